"""What gets installed: the wheel's contents, a wheel that works by itself, and the editable install."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from kv_canary import __version__

REPOSITORY = Path(__file__).parents[2]
ADAPTERS = ("kv_canary_transformers", "kv_canary_vllm", "kv_canary_sglang")
SOURCES = {"kv_canary": REPOSITORY / "daemon"} | dict.fromkeys(ADAPTERS, REPOSITORY / "adapters")
NOT_SOURCE = (
    *(".git", ".*_cache", ".hypothesis", ".stack", ".venv*", ".whl"),
    *("__pycache__", "*.egg-info", "build", "dist"),
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tree as a clone has it, by the build backend that the environment has."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = shutil.copytree(REPOSITORY, folder / "tree", ignore=shutil.ignore_patterns(*NOT_SOURCE))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(tree)]
    run(command, folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's content installed, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--target", str(folder), str(wheel)], folder)
    return folder


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Standard output of a command that must succeed, run in a folder that is not the repository."""
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    """A module that git would not see, a folder named daemon/ or adapters/, a stray test: all would show here."""
    expected = {
        path.relative_to(root).as_posix()
        for package, root in SOURCES.items()
        for path in (root / package).rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    assert {f"{package}/py.typed" for package in SOURCES} <= expected
    information = f"kv_canary-{__version__}.dist-info/"
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    assert {name for name in names if not name.startswith(information)} == expected
    assert {name.removeprefix(information) for name in names if name.startswith(information)} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }


def test_the_wheel_names_its_commands_its_demo_and_its_licence(wheel: Path) -> None:
    information = f"kv_canary-{__version__}.dist-info"
    with ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"{information}/METADATA").decode())
        points = ConfigParser()
        points.read_string(archive.read(f"{information}/entry_points.txt").decode())
        licence = archive.read(f"{information}/licenses/LICENSE")
    assert {section: dict(points[section]) for section in points.sections()} == {
        "console_scripts": {"kv-canary": "kv_canary.cli:main"},
        "kv_canary.bench": {
            "transformers": "kv_canary_transformers.bench:measure",
            "vllm": "kv_canary_vllm.bench:measure",
        },
        "kv_canary.bench.peers": {"sglang_reference": "kv_canary_sglang.bench:reference"},
        "kv_canary.demo": {"transformers": "kv_canary_transformers.demo:main"},
        "kv_canary.faults": {"transformers": "kv_canary_transformers.faults:run"},
        "sglang.srt.plugins": {"kv_canary": "kv_canary_sglang.plugin:register"},
        "vllm.general_plugins": {"kv_canary": "kv_canary_vllm.plugin:register"},
    }
    assert (metadata["Name"], metadata["Version"]) == ("kv-canary", __version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert licence == (REPOSITORY / "LICENSE").read_bytes()


def test_the_wheel_works_without_the_repository(installed: Path) -> None:
    code = f"import {', '.join(SOURCES)}; print(*(one.__file__ for one in ({', '.join(SOURCES)})), sep='\\n')"
    found = run([sys.executable, "-c", code], installed, PYTHONPATH=str(installed)).splitlines()
    assert [Path(file) for file in found] == [installed / package / "__init__.py" for package in SOURCES]


def test_the_installed_command_knows_its_version(installed: Path) -> None:
    said = run([str(installed / "bin" / "kv-canary"), "--version"], installed, PYTHONPATH=str(installed))
    assert said == f"kv-canary {__version__}\n"


@pytest.mark.parametrize("package", SOURCES)
def test_the_editable_install_is_the_repository(package: str, tmp_path: Path) -> None:
    """Also from elsewhere: an edit takes effect at once, and no copy is tested in its place."""
    found = run([sys.executable, "-c", f"import {package}; print({package}.__file__)"], tmp_path).strip()
    assert Path(found) == SOURCES[package] / package / "__init__.py"


def test_the_changelog_has_this_version_on_top() -> None:
    """The newest entry that is not [Unreleased]."""
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d[^\]]*)\]", text, re.MULTILINE)
    assert released[:1] == [__version__]
