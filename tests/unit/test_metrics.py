"""Metrics: the table, the closed label sets and both exposition formats."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from builders.snapshots import (
    NOW,
    make_counters,
    make_group,
    make_incident,
    make_progress,
    make_snapshot,
    make_uncovered,
)
from kv_canary.metrics import ERROR_COMPONENTS, HOOK_EVENTS, KERNELS, METRICS, metrics_registry
from kv_canary.snapshot import (
    CHECKS,
    DRILL_KINDS,
    DRILL_RESULTS,
    PAGE_STATES,
    PERSISTENCES,
    PURPOSES,
    SOURCES,
    SWEEP_DURATION_BUCKETS,
    SWEEP_RESULTS,
    TRANSFER_RESULTS,
    Snapshot,
)

DESIGN_TABLE = {
    "kv_canary_build_info": "version engine engine_version device",
    "kv_canary_enabled": "group",
    "kv_canary_mismatches_total": "group check persistence source",
    "kv_canary_read_bytes_total": "group purpose",
    "kv_canary_verified_pages_total": "group",
    "kv_canary_pages": "group state",
    "kv_canary_transfers_total": "group result",
    "kv_canary_sweeps_total": "group result",
    "kv_canary_sweep_duration_seconds": "group",
    "kv_canary_last_sweep_timestamp_seconds": "group",
    "kv_canary_oldest_verification_age_seconds": "group",
    "kv_canary_superseded_total": "group",
    "kv_canary_kernel_seconds_total": "kernel",
    "kv_canary_hook_seconds_total": "event",
    "kv_canary_errors_total": "component",
    "kv_canary_drills_total": "kind result",
    "kv_canary_last_tick_timestamp_seconds": "",
    "kv_canary_budget_bytes_per_second": "",
    "kv_canary_memory_bytes": "kind",
    "kv_canary_uncovered_buffers": "group",
}
CONTENT = {"group": "full", "check": "content", "persistence": "persistent", "source": "real"}


def value(snapshot: Snapshot, name: str, **labels: str) -> float | None:
    return metrics_registry(lambda: snapshot).get_sample_value(name, labels)


def exemplars(snapshot: Snapshot) -> dict[tuple[str, ...], Any]:
    text = openmetrics.generate_latest(metrics_registry(lambda: snapshot)).decode()
    return {
        tuple(sample.labels[name] for name in CONTENT): sample.exemplar
        for family in parse_openmetrics(text)
        for sample in family.samples
        if sample.name == "kv_canary_mismatches_total" and sample.exemplar
    }


def test_the_table_has_the_names_and_labels_of_the_design() -> None:
    """Dashboards and alert rules rely on exactly these names and labels."""
    assert {spec.name: " ".join(spec.labels) for spec in METRICS} == DESIGN_TABLE


def test_the_text_format_carries_every_row_of_the_table_with_its_type_and_labels() -> None:
    """What the reference page says is what a scrape gives."""
    text = generate_latest(metrics_registry(make_snapshot)).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for spec in METRICS:
        family = families.pop(spec.name.removesuffix("_total"))
        assert (family.type, family.documentation) == (spec.type, spec.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(spec.labels), spec.name
    assert not families


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kv_canary_mismatches_total", len(CHECKS) * len(PERSISTENCES) * len(SOURCES)),
        ("kv_canary_read_bytes_total", len(PURPOSES)),
        ("kv_canary_pages", len(PAGE_STATES)),
        ("kv_canary_transfers_total", len(TRANSFER_RESULTS)),
        ("kv_canary_sweeps_total", len(SWEEP_RESULTS)),
        ("kv_canary_drills_total", len(DRILL_KINDS) * len(DRILL_RESULTS)),
        ("kv_canary_kernel_seconds_total", len(KERNELS)),
        ("kv_canary_hook_seconds_total", len(HOOK_EVENTS)),
        ("kv_canary_errors_total", len(ERROR_COMPONENTS)),
        ("kv_canary_sweep_duration_seconds_count", 1),
    ],
)
def test_every_series_of_a_closed_set_is_there_with_zero_from_the_start(name: str, expected: int) -> None:
    """`increase()` sees the first event only if the series existed before it."""
    group = make_group(pages={}, counters=make_counters(read_bytes={}, sweep_duration_buckets=()))
    registry = metrics_registry(lambda: make_snapshot(groups=(group,)))
    values = [sample.value for family in registry.collect() for sample in family.samples if sample.name == name]
    assert values == [0] * expected


def test_values_beyond_a_closed_set_are_kept() -> None:
    """An error of a component that the table does not know is still counted."""
    assert value(make_snapshot(errors={"novel": 3}), "kv_canary_errors_total", component="novel") == 3


@pytest.mark.parametrize(("master", "own", "expected"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_a_group_is_enabled_only_if_the_master_switch_is_on_too(master: bool, own: bool, expected: int) -> None:
    """The gauge says whether the group is guarded, not where its own switch stands."""
    snapshot = make_snapshot(enabled=master, groups=(make_group(enabled=own),))
    assert value(snapshot, "kv_canary_enabled", group="full") == expected


def test_a_group_that_was_never_swept_has_timestamp_zero() -> None:
    """0 is old for any alert rule; a missing series would silence it."""
    assert value(make_snapshot(), "kv_canary_last_sweep_timestamp_seconds", group="full") == 0


def test_numbers_come_from_the_snapshot() -> None:
    """Each metric shows the field that it is named after."""
    counters = make_counters(
        mismatches={("content", "persistent", "real"): 2}, read_bytes={"sweep": 900}, verified_pages=7, superseded=4
    )
    group = make_group(counters=counters, sweep=make_progress(last_finished_at=NOW), uncovered=(make_uncovered(),))
    snapshot = make_snapshot(
        groups=(group,),
        uncovered=(make_uncovered(), make_uncovered()),
        drills_total={("fingerprint", "missed"): 1},
        kernel_seconds={"sweep": 0.25},
        hook_seconds={"write": 0.5},
    )
    assert value(snapshot, "kv_canary_mismatches_total", **CONTENT) == 2
    assert value(snapshot, "kv_canary_read_bytes_total", group="full", purpose="sweep") == 900
    assert value(snapshot, "kv_canary_verified_pages_total", group="full") == 7
    assert value(snapshot, "kv_canary_superseded_total", group="full") == 4
    assert value(snapshot, "kv_canary_pages", group="full", state="sealed") == 60
    assert value(snapshot, "kv_canary_last_sweep_timestamp_seconds", group="full") == NOW
    assert value(snapshot, "kv_canary_oldest_verification_age_seconds", group="full") == 12
    assert value(snapshot, "kv_canary_uncovered_buffers", group="full") == 1
    assert value(snapshot, "kv_canary_uncovered_buffers", group="") == 2
    assert value(snapshot, "kv_canary_drills_total", kind="fingerprint", result="missed") == 1
    assert value(snapshot, "kv_canary_kernel_seconds_total", kernel="sweep") == 0.25
    assert value(snapshot, "kv_canary_hook_seconds_total", event="write") == 0.5
    assert value(snapshot, "kv_canary_last_tick_timestamp_seconds") == NOW
    assert value(snapshot, "kv_canary_budget_bytes_per_second") == 2e8
    assert value(snapshot, "kv_canary_memory_bytes", kind="fingerprints") == 8192


def test_sweep_durations_become_a_cumulative_histogram() -> None:
    """Prometheus wants running totals; the snapshot counts each bucket by itself."""
    counts = (1, 0, 2, *(0,) * (len(SWEEP_DURATION_BUCKETS) - 3), 4)
    group = make_group(counters=make_counters(sweep_duration_buckets=counts, sweep_duration_sum=9000.5))
    snapshot, name = make_snapshot(groups=(group,)), "kv_canary_sweep_duration_seconds"
    assert value(snapshot, f"{name}_bucket", group="full", le="0.1") == 1
    assert value(snapshot, f"{name}_bucket", group="full", le="0.5") == 1
    assert value(snapshot, f"{name}_bucket", group="full", le="1800.0") == 3
    assert value(snapshot, f"{name}_bucket", group="full", le="+Inf") == 7
    assert value(snapshot, f"{name}_count", group="full") == 7
    assert value(snapshot, f"{name}_sum", group="full") == 9000.5


def counted(**incident: Any) -> Snapshot:
    group = make_group(counters=make_counters(mismatches={("content", "persistent", "real"): 2}))
    incidents = (make_incident(1), make_incident(2, **incident), make_incident(3, source="drill"))
    return make_snapshot(groups=(group,), incidents=incidents)


def test_a_mismatch_counter_carries_the_newest_incident_of_its_labels_as_exemplar() -> None:
    """From an alert to the incident without a search; a drill that is not counted gets none."""
    found = exemplars(counted())
    assert list(found) == [tuple(CONTENT.values())]
    exemplar = found[tuple(CONTENT.values())]
    assert exemplar.labels == {"incident": "incident-2", "page": "42"}
    assert float(exemplar.timestamp) == NOW - 10


def test_an_exemplar_over_the_length_limit_is_left_out() -> None:
    """OpenMetrics refuses more than 128 characters, and with them the whole scrape."""
    assert exemplars(counted(id="x" * 128)) == {}


def test_the_text_format_has_no_exemplars() -> None:
    """The plain text format has no syntax for them."""
    text = generate_latest(metrics_registry(counted)).decode()
    assert "incident-2" not in text
    assert value(counted(), "kv_canary_mismatches_total", **CONTENT) == 2


def test_each_scrape_reads_the_newest_snapshot() -> None:
    """The collector keeps nothing between two scrapes."""
    snapshots = iter((make_snapshot(tick_at=1.0), make_snapshot(tick_at=2.0)))
    registry = metrics_registry(lambda: next(snapshots))
    name = "kv_canary_last_tick_timestamp_seconds"
    assert [registry.get_sample_value(name), registry.get_sample_value(name)] == [1.0, 2.0]


def test_importing_metrics_leaves_prometheus_client_alone() -> None:
    """prometheus_client picks multiprocess mode at its import, and SGLang sets that up after plugins load."""
    code = "import sys, kv_canary, kv_canary.metrics; print('prometheus_client' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_the_default_registry_stays_as_it_was() -> None:
    """The host scrapes the default registry: nothing of ours may show up there."""
    from prometheus_client import REGISTRY

    metrics_registry(make_snapshot)
    assert "kv_canary" not in generate_latest(REGISTRY).decode()
