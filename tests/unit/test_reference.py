"""The reference pages: they say what the code says, and leave nothing out."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from builders.control import FakeControl
from kv_canary.http.api import build_app
from kv_canary.metric_table import METRICS, OPEN_LABELS
from kv_canary.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_reference", DOCS / "generate_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_what_the_code_says(generator: ModuleType) -> None:
    """After a change: `python docs/generate_reference.py`."""
    assert generator.main(["--check"]) == 0


def test_a_stale_page_is_named(generator: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generator.main([], tmp_path) == 0
    assert generator.main(["--check"], tmp_path) == 0
    (tmp_path / "api.md").write_text("old")
    (tmp_path / "settings.md").unlink()
    assert generator.main(["--check"], tmp_path) == 1
    assert "settings.md, api.md" in capsys.readouterr().err
    assert generator.main(["--nonsense"], tmp_path) == 2


def test_every_setting_has_a_row_with_all_that_a_person_needs() -> None:
    text = (DOCS / "reference" / "settings.md").read_text()
    for one in fields(Settings):
        (row,) = re.findall(rf"^\| `{one.name}` \|.*$", text, re.MULTILINE)
        assert all(cell.strip() for cell in row.strip("|").split("|"))
        assert one.metadata["allowed"] in row
        assert one.metadata["help"] in row


def test_every_call_has_a_section() -> None:
    text = (DOCS / "reference" / "api.md").read_text()
    for path, operations in build_app(FakeControl(), settings=Settings()).openapi()["paths"].items():
        for method, operation in operations.items():
            assert f"\n## {method.upper()} {path}\n" in text
            assert operation["description"]
            assert all(one.get("description") or one["in"] == "path" for one in operation.get("parameters", ()))


def test_every_link_leads_to_a_section() -> None:
    text = (DOCS / "reference" / "api.md").read_text()
    sections = {line.lstrip("# ").lower() for line in text.splitlines() if line.startswith("#")}
    assert set(re.findall(r"\(#([^)]+)\)", text)) <= sections


@pytest.mark.parametrize("spec", METRICS, ids=lambda spec: spec.name)
def test_every_metric_has_its_labels_explained_and_an_example_that_is_about_it(spec) -> None:
    text = (DOCS / "reference" / "metrics.md").read_text()
    assert f"\n## {spec.name}\n" in text
    assert spec.name in spec.example
    assert all((label in spec.values) != (label in OPEN_LABELS) for label in spec.labels)
    assert set(spec.values) <= set(spec.labels)


@pytest.mark.parametrize("spec", [spec for spec in METRICS if spec.values], ids=lambda spec: spec.name)
def test_the_closed_sets_that_are_documented_are_those_of_the_series(spec) -> None:
    """A value that a series can have and that the table leaves out would be a lie in the reference."""
    from builders.snapshots import make_snapshot

    for point in spec.points(make_snapshot()):
        for label, value in zip(spec.labels, point.labels, strict=True):
            assert value in spec.values.get(label, (value,))
