"""What an import brings along: nothing that is not needed yet, and never an engine."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DAEMON = ROOT / "daemon"
ADAPTERS = ROOT / "adapters"
ENGINES = ("transformers", "vllm", "sglang")


HEAVY = {"fastapi", "starlette", "uvicorn", "pydantic", "numba", "llvmlite", "triton", "prometheus_client"}


@cache
def fresh_import(module: str) -> tuple[set[str], int]:
    """Top-level packages that a new interpreter gains by importing `module`, and its threads then.

    The sidecar needs torch; what torch brings along is not counted.
    """
    program = f"""
import sys, threading
{"import torch" if module != "kv_canary" else ""}
before = set(sys.modules)
import {module}
print(threading.active_count(), *{{name.partition(".")[0] for name in set(sys.modules) - before}})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    threads, *packages = done.stdout.split()
    return set(packages), int(threads)


@pytest.mark.parametrize("module", ["kv_canary", "kv_canary.sidecar"])
def test_an_import_brings_along_nothing_that_is_not_needed_yet(module: str) -> None:
    packages, _ = fresh_import(module)
    assert "kv_canary" in packages
    assert packages & (HEAVY | set(ENGINES)) == set()


def test_the_package_itself_brings_nothing_but_the_standard_library() -> None:
    """`import kv_canary` happens in every process of a server."""
    packages, _ = fresh_import("kv_canary")
    assert {name for name in packages if name not in sys.stdlib_module_names} == {"kv_canary"}


@pytest.mark.parametrize("module", ["kv_canary", "kv_canary.sidecar"])
def test_an_import_starts_no_thread(module: str) -> None:
    assert fresh_import(module)[1] == 1


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import statement of a file, lazy ones and `importlib.import_module("...")` too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def test_the_walk_sees_lazy_and_indirect_imports(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(
        "def f():\n    import vllm.core as v\n    from sglang.srt import x\n    import_module('transformers')\n"
    )
    assert [module for _, module in imports(path)] == ["vllm.core", "sglang.srt", "transformers"]


@pytest.mark.parametrize("path", python_files(DAEMON), ids=lambda path: str(path.relative_to(DAEMON)))
def test_no_module_of_the_daemon_imports_an_engine_or_an_adapter(path: Path) -> None:
    wrong = [
        f"line {line}: {module}"
        for line, module in imports(path)
        if module.partition(".")[0] in ENGINES or module.startswith("kv_canary_")
    ]
    assert wrong == []


@pytest.mark.parametrize("path", python_files(ADAPTERS), ids=lambda path: str(path.relative_to(ADAPTERS)))
def test_an_adapter_imports_no_other_adapter_and_no_other_engine(path: Path) -> None:
    own = path.relative_to(ADAPTERS).parts[0]
    allowed = {own, own.removeprefix("kv_canary_")}
    wrong = [
        f"line {line}: {module}"
        for line, module in imports(path)
        if (top := module.partition(".")[0]) not in allowed and (top in ENGINES or top.startswith("kv_canary_"))
    ]
    assert wrong == []


@pytest.mark.parametrize("path", python_files(DAEMON), ids=lambda path: str(path.relative_to(DAEMON)))
def test_nothing_below_the_command_line_imports_it(path: Path) -> None:
    if path.is_relative_to(DAEMON / "kv_canary" / "cli") or path.name == "__main__.py":
        return
    assert [f"line {line}: {module}" for line, module in imports(path) if module.startswith("kv_canary.cli")] == []


def test_there_are_files_to_look_at() -> None:
    assert len(python_files(DAEMON)) > 30
    assert python_files(ADAPTERS)
