"""The dashboards: what is checked in is what the code makes, Grafana's own schema knows every key of it, and it is fit
for a fleet. That every query has data is tested against a real Prometheus (tests/stack).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import units

from builders.dashboards import queries_of
from kv_canary.metric_table import METRICS

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))
UNITS = {value for name, value in vars(units).items() if not name.startswith("_") and isinstance(value, str)}
LABELS = {spec.name: {*spec.labels, "job", "instance"} for spec in METRICS}
NAMES = ["kv-canary-fleet.json", "kv-canary-instance.json"]

Document = dict[str, Any]


def load(file: Path) -> Document:
    return dict(json.loads(file.read_text(encoding="utf-8")))


def panels(dashboard: Document) -> Iterator[Document]:
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            yield panel
        yield from panel.get("panels", ())


each = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def test_there_is_one_for_the_fleet_and_one_for_an_instance() -> None:
    assert [file.name for file in FILES] == NAMES


def test_the_files_are_what_the_code_makes() -> None:
    done = subprocess.run(
        [sys.executable, str(GRAFANA / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:Prefer using dashboardv2:DeprecationWarning")
@each
def test_it_survives_a_round_trip_through_grafanas_schema(file: Path) -> None:
    """The SDK drops keys that it does not know: a difference is a key that Grafana would not read.

    This is the schema that files are provisioned in; the second one is for Grafana's newer API.
    """
    from grafana_foundation_sdk.models.dashboard import Dashboard

    document = load(file)
    again = json.loads(json.dumps(Dashboard.from_json(document), cls=JSONEncoder))
    assert again == document


@each
def test_every_panel_says_what_it_shows_in_which_unit_and_what_is_normal(file: Path) -> None:
    for panel in panels(load(file)):
        assert panel["title"]
        assert len(panel.get("description", "")) > 20, panel["title"]
        assert panel["fieldConfig"]["defaults"].get("unit") in UNITS, panel["title"]
        assert panel["targets"], panel["title"]


@each
def test_every_query_goes_to_the_chosen_data_source(file: Path) -> None:
    """No dashboard works elsewhere whose queries name a data source of one Grafana."""
    dashboard = load(file)
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    sources = [panel["datasource"] for panel in panels(dashboard)]
    sources += [target["datasource"] for panel in panels(dashboard) for target in panel["targets"]]
    sources += [annotation["datasource"] for annotation in dashboard["annotations"]["list"]]
    sources += [variable["datasource"] for variable in variables.values() if variable["type"] == "query"]
    assert {(source["type"], source["uid"]) for source in sources} == {("prometheus", "${datasource}")}


@each
def test_job_instance_and_group_can_be_chosen_and_every_query_heeds_them(file: Path) -> None:
    dashboard = load(file)
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert names[:4] == ["datasource", "job", "instance", "group"]
    for _, expression in queries_of(dashboard):
        for metric, matchers in re.findall(r"(kv_canary_\w+)(?:\{([^}]*)\})?", expression):
            family = re.sub(r"_(bucket|count|sum)$", "", metric)
            assert family in LABELS, f"{metric} is not exported"
            assert 'job=~"$job"' in matchers, expression
            assert 'instance=~"$instance"' in matchers, expression
            whole = family in ("kv_canary_uncovered_buffers",) and "group=~" not in matchers
            assert ('group=~"$group"' in matchers) == ("group" in LABELS[family] and not whole), expression


@each
def test_rates_go_over_the_rate_interval(file: Path) -> None:
    """A fixed range is empty at a long scrape interval, and hides peaks when one zooms out."""
    for _, expression in queries_of(load(file)):
        assert re.findall(r"\[(.*?)\]", expression) == ["$__rate_interval"] * len(re.findall(r"\[", expression))
        assert len(re.findall(r"\b(?:rate|increase)\(", expression)) == len(re.findall(r"\[", expression))


@each
def test_panels_have_lasting_numbers_and_do_not_overlap(file: Path) -> None:
    dashboard = load(file)
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert numbers == list(range(1, len(numbers) + 1))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


@each
def test_legends_and_marks_use_labels_that_the_query_gives(file: Path) -> None:
    dashboard = load(file)
    texts = [
        (target["expr"], target["legendFormat"])
        for panel in panels(dashboard)
        for target in panel["targets"]
        if "{{" in target.get("legendFormat", "")
    ]
    texts += [(mark["expr"], mark["textFormat"]) for mark in dashboard["annotations"]["list"]]
    assert texts
    for expression, text in texts:
        given = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", expression))))
        if not given:
            given = LABELS[re.findall(r"kv_canary_\w+", expression)[0]]
        assert set(re.findall(r"\{\{(\w+)\}\}", text)) <= given, expression


def test_a_fleets_server_opens_as_an_instance() -> None:
    fleet, instance = (load(GRAFANA / "dashboards" / name) for name in NAMES)
    links = re.findall(r'"url": "([^"]+)"', json.dumps(fleet))
    assert [link.split("?")[0] for link in links] == [f"/d/{instance['uid']}"]
    assert {variable["name"] for variable in instance["templating"]["list"]} >= set(re.findall(r"var-(\w+)=", links[0]))
    assert [link["url"] for link in instance["links"]] == [f"/d/{fleet['uid']}"]


def test_grafana_is_told_where_the_dashboards_and_the_data_are() -> None:
    provisioning = GRAFANA / "provisioning"
    sources = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())
    providers = yaml.safe_load((provisioning / "dashboards" / "kv-canary.yaml").read_text())
    assert [(source["type"], source["isDefault"]) for source in sources["datasources"]] == [("prometheus", True)]
    assert [provider["type"] for provider in providers["providers"]] == ["file"]
