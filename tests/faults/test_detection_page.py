"""The tables of docs/detection.md are what a run of the harness says, but for the seconds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_detection", DOCS / "generate_detection.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_says_what_a_run_says(generator: ModuleType) -> None:
    """After a change: `python docs/generate_detection.py`."""
    assert generator.main(["--check", "harness"]) == 0


def test_a_row_that_is_not_so_is_noticed(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / "detection.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| F7 "))
    changed = tmp_path / "detection.md"
    changed.write_text(page.replace(row, row.replace("`ownership`", "`content`"), 1), encoding="utf-8")
    monkeypatch.setattr(generator, "PAGE", changed)
    assert generator.main(["--check", "harness"]) == 1


def test_seconds_are_left_out_of_the_comparison(generator: ModuleType) -> None:
    assert generator.without_seconds("| F1 | caught | 12 ms | 0 |") == generator.without_seconds(
        "| F1 | caught | 9 ms | 0 |"
    )
    assert generator.without_seconds("| F1 | 12 ms |") != generator.without_seconds("| F2 | 12 ms |")


def test_every_fault_has_its_row() -> None:
    from kv_canary.faults.catalogue import FAULTS
    from kv_canary.faults.controls import CONTROLS

    page = (DOCS / "detection.md").read_text(encoding="utf-8")
    assert all(f"| {one.name} | {one.title} |" in page for one in (*FAULTS, *CONTROLS))
