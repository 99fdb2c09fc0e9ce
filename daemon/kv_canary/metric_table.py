"""The table of Prometheus metrics: name, type, labels, help, and how each one's series come out of a snapshot.

The single source of both `/metrics` and the reference page. Pure functions of the snapshot; no state and no thread.
Every series of a closed label set exists from the start, with 0: a series that appears with its first event hides that
event from `increase()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from kv_canary.snapshot import (
    CHECKS,
    DRILL_KINDS,
    DRILL_RESULTS,
    PAGE_STATES,
    PERSISTENCES,
    PURPOSES,
    SOURCES,
    SWEEP_RESULTS,
    TRANSFER_RESULTS,
    GroupSnapshot,
    Incident,
    Snapshot,
)

OPEN_LABELS: Mapping[str, str] = {
    "group": "the name of a canary group, as in `/v1/groups`",
    "version": "the version of KV Canary",
    "engine": "the engine's name",
    "engine_version": "the engine's version",
    "device": "where the pool lives, such as `cuda:0`",
}
"""Labels whose values come from the server; there are as many of them as it has groups."""

MEMORY_KINDS = ("ledger", "fingerprints")
KERNELS = ("seal", "sweep", "confirm", "claim", "transfer", "drill")
HOOK_EVENTS = (
    *("allocate", "write", "seal", "claim", "reopen", "adopt", "release", "free", "move", "load", "export", "admit"),
    *("forget", "step"),
)
ERROR_COMPONENTS = ("hook", "ledger", "scrubber", "sealer", "drill", "incident_log", "http", "thread", "reaction")

MetricType = Literal["gauge", "counter", "histogram"]
Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One series: its label values in the metric's order, and its value (for a histogram: sum and counts a bucket)."""

    labels: Labels = ()
    value: float
    bucket_counts: tuple[int, ...] = ()
    incident: Incident | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One row of the table: what the reference page prints, and how the series come out of a snapshot."""

    name: str
    type: MetricType
    labels: Labels
    help: str
    points: Callable[[Snapshot], Iterable[Point]]
    example: str
    """A query that a person would ask."""
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The closed sets: what a label can be. Labels that are not in here are in `OPEN_LABELS`."""


def _one(read: Callable[[Snapshot], float]) -> Callable[[Snapshot], Iterator[Point]]:
    def points(snapshot: Snapshot) -> Iterator[Point]:
        yield Point(value=read(snapshot))

    return points


def _each_group(read: Callable[[GroupSnapshot], float]) -> Callable[[Snapshot], Iterator[Point]]:
    def points(snapshot: Snapshot) -> Iterator[Point]:
        for group in snapshot.groups:
            yield Point(labels=(group.name,), value=read(group))

    return points


def _each_group_and(
    closed: tuple[str, ...], read: Callable[[GroupSnapshot], Mapping[Any, float]]
) -> Callable[[Snapshot], Iterator[Point]]:
    def points(snapshot: Snapshot) -> Iterator[Point]:
        for group in snapshot.groups:
            for key, value in _filled(closed, read(group)):
                yield Point(labels=(group.name, key), value=value)

    return points


def _keyed(
    closed: tuple[str, ...], read: Callable[[Snapshot], Mapping[str, float]]
) -> Callable[[Snapshot], Iterator[Point]]:
    def points(snapshot: Snapshot) -> Iterator[Point]:
        for key, value in _filled(closed, read(snapshot)):
            yield Point(labels=(key,), value=value)

    return points


def _filled(closed: tuple[str, ...], values: Mapping[Any, float]) -> Iterator[tuple[str, float]]:
    """The closed set, 0 where nothing happened yet, then whatever else the snapshot knows."""
    for key in (*closed, *sorted(values.keys() - set(closed))):
        yield key, values.get(key, 0)


def _build_info(snapshot: Snapshot) -> Iterator[Point]:
    yield Point(labels=(snapshot.version, snapshot.engine, snapshot.engine_version, snapshot.device), value=1)


def _enabled(snapshot: Snapshot) -> Iterator[Point]:
    for group in snapshot.groups:
        yield Point(labels=(group.name,), value=snapshot.enabled and group.enabled)


def _mismatches(snapshot: Snapshot) -> Iterator[Point]:
    newest = _newest_incidents(snapshot)
    for group in snapshot.groups:
        for check, persistence, source in product(CHECKS, PERSISTENCES, SOURCES):
            labels = (group.name, check, persistence, source)
            count = group.counters.mismatches.get((check, persistence, source), 0)
            yield Point(labels=labels, value=count, incident=newest.get(labels))


def _newest_incidents(snapshot: Snapshot) -> dict[Labels, Incident]:
    """The newest incident of every series that counts one. Incidents lie oldest first: the walk is short."""
    wanted = {
        (group.name, *key) for group in snapshot.groups for key, count in group.counters.mismatches.items() if count
    }
    newest: dict[Labels, Incident] = {}
    for incident in reversed(snapshot.incidents):
        if len(newest) == len(wanted):
            break
        labels = (incident.group, incident.check, incident.persistence, incident.source)
        if incident.counted and labels in wanted:
            newest.setdefault(labels, incident)
    return newest


def _uncovered(snapshot: Snapshot) -> Iterator[Point]:
    # To Prometheus an empty label is no label: buffers that belong to no group count in a sum and match no group.
    yield Point(labels=("",), value=len(snapshot.uncovered))
    for group in snapshot.groups:
        yield Point(labels=(group.name,), value=len(group.uncovered))


def _sweep_durations(snapshot: Snapshot) -> Iterator[Point]:
    for group in snapshot.groups:
        counters = group.counters
        yield Point(
            labels=(group.name,), value=counters.sweep_duration_sum, bucket_counts=counters.sweep_duration_buckets
        )


def _drills(snapshot: Snapshot) -> Iterator[Point]:
    for kind, result in product(DRILL_KINDS, DRILL_RESULTS):
        yield Point(labels=(kind, result), value=snapshot.drills_total.get((kind, result), 0))


def _spec(
    name: str,
    type: MetricType,
    labels: str,
    help: str,
    points: Callable[[Snapshot], Iterable[Point]],
    example: str,
    **values: tuple[str, ...],
) -> MetricSpec:
    return MetricSpec(
        name="kv_canary_" + name,
        type=type,
        labels=tuple(labels.split()),
        help=help,
        points=points,
        example=example,
        values=values,
    )


METRICS: tuple[MetricSpec, ...] = (
    _spec(
        "build_info",
        "gauge",
        "version engine engine_version device",
        "What runs here; always 1.",
        _build_info,
        "count by (version, engine, engine_version) (kv_canary_build_info)",
    ),
    _spec(
        "enabled",
        "gauge",
        "group",
        "1 while the master switch and the group's own switch are on.",
        _enabled,
        "kv_canary_enabled == 0",
    ),
    _spec(
        "mismatches_total",
        "counter",
        "group check persistence source",
        "Checks that failed and were confirmed. source=drill counts only drills posted with alert.",
        _mismatches,
        'increase(kv_canary_mismatches_total{source="real"}[5m]) > 0',
        check=CHECKS,
        persistence=PERSISTENCES,
        source=SOURCES,
    ),
    _spec(
        "read_bytes_total",
        "counter",
        "group purpose",
        "Bytes of the KV cache that the canary read, by purpose.",
        _each_group_and(PURPOSES, lambda group: group.counters.read_bytes),
        "sum by (purpose) (rate(kv_canary_read_bytes_total[5m]))",
        purpose=PURPOSES,
    ),
    _spec(
        "verified_pages_total",
        "counter",
        "group",
        "Pages whose bytes were compared with their fingerprint.",
        _each_group(lambda group: group.counters.verified_pages),
        "rate(kv_canary_verified_pages_total[5m])",
    ),
    _spec(
        "pages",
        "gauge",
        "group state",
        "Pages by state.",
        _each_group_and(PAGE_STATES, lambda group: group.pages),
        'kv_canary_pages{state="unknown"} / ignoring(state) group_left sum without (state) (kv_canary_pages)',
        state=PAGE_STATES,
    ),
    _spec(
        "transfers_total",
        "counter",
        "group result",
        "Pages that came back from a tier or a peer: held against what left, or skipped where that is not known.",
        _each_group_and(TRANSFER_RESULTS, lambda group: group.counters.transfers),
        'sum by (group) (rate(kv_canary_transfers_total{result="skipped"}[15m])) > 0',
        result=TRANSFER_RESULTS,
    ),
    _spec(
        "sweeps_total",
        "counter",
        "group result",
        "Passes over all sealed pages of a group.",
        _each_group_and(SWEEP_RESULTS, lambda group: group.counters.sweeps),
        "sum by (result) (increase(kv_canary_sweeps_total[1h]))",
        result=SWEEP_RESULTS,
    ),
    _spec(
        "sweep_duration_seconds",
        "histogram",
        "group",
        "Duration of a whole pass over a group.",
        _sweep_durations,
        "histogram_quantile(0.95, sum by (le) (rate(kv_canary_sweep_duration_seconds_bucket[1h])))",
    ),
    _spec(
        "last_sweep_timestamp_seconds",
        "gauge",
        "group",
        "When the last whole pass ended, seconds since 1970; 0 before the first.",
        _each_group(lambda group: group.sweep.last_finished_at or 0),
        "time() - kv_canary_last_sweep_timestamp_seconds",
    ),
    _spec(
        "oldest_verification_age_seconds",
        "gauge",
        "group",
        "Age of the oldest last verification among sealed pages.",
        _each_group(lambda group: group.oldest_verification_age_seconds),
        "max(kv_canary_oldest_verification_age_seconds)",
    ),
    _spec(
        "superseded_total",
        "counter",
        "group",
        "Results dropped because the page was legitimately rewritten during the read.",
        _each_group(lambda group: group.counters.superseded),
        "rate(kv_canary_superseded_total[5m]) / rate(kv_canary_verified_pages_total[5m])",
    ),
    _spec(
        "kernel_seconds_total",
        "counter",
        "kernel",
        "Device seconds in the canary's kernels.",
        _keyed(KERNELS, lambda snapshot: snapshot.kernel_seconds),
        "sum(rate(kv_canary_kernel_seconds_total[5m]))",
        kernel=KERNELS,
    ),
    _spec(
        "hook_seconds_total",
        "counter",
        "event",
        "Seconds that the canary's hooks took on the engine's thread.",
        _keyed(HOOK_EVENTS, lambda snapshot: snapshot.hook_seconds),
        "sum(rate(kv_canary_hook_seconds_total[5m]))",
        event=HOOK_EVENTS,
    ),
    _spec(
        "errors_total",
        "counter",
        "component",
        "Errors inside the canary; the engine goes on.",
        _keyed(ERROR_COMPONENTS, lambda snapshot: snapshot.errors),
        "sum by (component) (increase(kv_canary_errors_total[15m])) > 0",
        component=ERROR_COMPONENTS,
    ),
    _spec(
        "drills_total",
        "counter",
        "kind result",
        "Drills, the automatic ones included, by how they ended.",
        _drills,
        'increase(kv_canary_drills_total{result="detected"}[30m]) == 0',
        kind=DRILL_KINDS,
        result=DRILL_RESULTS,
    ),
    _spec(
        "last_tick_timestamp_seconds",
        "gauge",
        "",
        "When the canary thread last went round, seconds since 1970.",
        _one(lambda snapshot: snapshot.tick_at),
        "time() - kv_canary_last_tick_timestamp_seconds > 60",
    ),
    _spec(
        "budget_bytes_per_second",
        "gauge",
        "",
        "Read budget of background sweeps; 0 when they are off.",
        _one(lambda snapshot: snapshot.budget_bytes_per_second),
        "kv_canary_budget_bytes_per_second == 0",
    ),
    _spec(
        "memory_bytes",
        "gauge",
        "kind",
        "Memory that the canary holds.",
        _keyed((), lambda it: it.memory_bytes),
        "sum by (instance) (kv_canary_memory_bytes)",
        kind=MEMORY_KINDS,
    ),
    _spec(
        "uncovered_buffers",
        "gauge",
        "group",
        "Tensors that are not checked; an empty group is what belongs to no group. /v1/status lists them with reasons.",
        _uncovered,
        "sum by (instance) (kv_canary_uncovered_buffers) > 0",
    ),
)
