"""The documents that go over HTTP: the only place with pydantic.

Bodies refuse keys that they do not know. Answers reuse the snapshot's own frozen dataclasses and reshape only what JSON
cannot carry: totals keyed by a tuple become lists of entries. Stateless; runs on the HTTP thread.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from kv_canary.snapshot import (
    Check,
    Drill,
    DrillKind,
    GroupKind,
    GroupSnapshot,
    Incident,
    Persistence,
    SidecarState,
    Snapshot,
    Source,
    SweepProgress,
    SweepRequest,
    UncoveredBuffer,
)


class Problem(BaseModel):
    """An error (RFC 9457). Some carry more members, such as `errors` or `key`, `value` and `allowed`."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="Always about:blank: the status says it all.")
    title: str
    status: int
    detail: str = Field(description="What was wrong, with the value, and the way out.")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class EnabledBody(_Body):
    """A switch."""

    enabled: StrictBool


class SweepBody(_Body):
    """What to sweep; without a group, everything."""

    group: str | None = None


class DrillBody(_Body):
    """What to inject; without a group, the first one that has a verified page."""

    kind: DrillKind
    group: str | None = None
    alert: StrictBool = Field(
        default=False, description="Count it as a mismatch with source=drill: rehearses the alerts."
    )


class _Answer(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class CanaryAnswer(_Answer):
    """The master switch."""

    enabled: bool
    state: SidecarState
    reason: str | None


class HealthAnswer(_Answer):
    """Why the probe is content."""

    status: Literal["ok"] = "ok"
    state: SidecarState


class MismatchCount(_Answer):
    """A count of confirmed mismatches; the ones that are 0 are left out."""

    check: Check
    persistence: Persistence
    source: Source
    count: int


class DrillCount(_Answer):
    """A count of drills."""

    kind: DrillKind
    result: str
    count: int


class CountersAnswer(_Answer):
    """Totals since attach."""

    mismatches: list[MismatchCount]
    read_bytes: dict[str, int]
    verified_pages: int
    sealed_pages: int
    claims: int
    claims_not_covered: int
    superseded: int
    sweeps: dict[str, int]
    transfers: dict[str, int]


class GroupAnswer(_Answer):
    """One canary group."""

    name: str
    kind: GroupKind
    enabled: bool
    disabled_reason: str | None
    total_pages: int
    pages: dict[str, int]
    bytes_per_page: int
    buffers: int
    stripes: int
    coverage: str
    uncovered: list[UncoveredBuffer]
    layout_signature: str
    kv_token_id_vs_position_offset: int
    sweep: SweepProgress
    oldest_verification_age_seconds: float
    counters: CountersAnswer

    @classmethod
    def of(cls, group: GroupSnapshot) -> GroupAnswer:
        counters = group.counters
        mismatches = [
            MismatchCount(check=check, persistence=persistence, source=source, count=count)
            for (check, persistence, source), count in counters.mismatches.items()
            if count
        ]
        totals = _attributes(CountersAnswer, counters) | {"mismatches": mismatches}
        return cls.model_validate(_attributes(cls, group) | {"counters": totals})


class GroupsAnswer(_Answer):
    groups: list[GroupAnswer]


class SweepAnswer(_Answer):
    """A sweep that somebody asked for; `progress` runs from 0 to 1."""

    id: str
    groups: list[str]
    state: Literal["running", "finished", "interrupted"]
    started_at: float
    finished_at: float | None
    scanned_pages: int
    verified_pages: int
    total_pages: int
    mismatches: int
    progress: float

    @classmethod
    def of(cls, sweep: SweepRequest) -> SweepAnswer:
        return cls.model_validate(_attributes(cls, sweep))


class SweepsAnswer(_Answer):
    sweeps: list[SweepAnswer]


class DrillsAnswer(_Answer):
    drills: list[Drill]


class IncidentsAnswer(_Answer):
    """One page of incidents, newest last. `next` is the `after` of the following page; null on the last one."""

    incidents: list[Incident]
    next: str | None
    total: int = Field(description="Incidents since the start, those included that are no longer kept.")


class PageMapAnswer(_Answer):
    """Every page of a group at one moment, one byte a cell. The larger byte is the worse page; a cell shows its worst.

    Bits 0 to 2 are the age class: how many of `age_bounds_seconds` have passed since the page was last seen good, or 7
    for a page that is not verified now. Bits 3 to 5 are the state's place in `states`. 64: an incident of a drill names
    a page of the cell. 128: an incident that is no drill's names a page of the cell.
    """

    group: str
    built_at: float = Field(description="Seconds since 1970.")
    first_page: int = Field(description="The number of the first page of the first cell.")
    pages: int
    pages_per_cell: int = Field(description="Pages in a row that share a cell; the last cell may have fewer.")
    states: list[str] = Field(
        description="From harmless to worst; `elsewhere` is a page that another group of the same memory holds now."
    )
    age_bounds_seconds: list[float]
    counts: dict[str, list[int]] = Field(
        description="Pages by state and age class; the last entry counts those that are not verified now."
    )
    mismatched_pages: int = Field(description="Pages that an incident which is kept, and is no drill's, names.")
    drilled_pages: int = Field(description="Pages that an incident of a drill names.")
    cells: str = Field(description="The bytes, in base64; 65,536 at most.")


class TargetGroup(_Answer):
    """One entry of a Prometheus http_sd list."""

    targets: list[str]
    labels: dict[str, str]


class StatusAnswer(_Answer):
    """The whole sidecar at one moment. Times are seconds since 1970."""

    version: str
    engine: str
    engine_version: str
    device: str
    pid: int
    rank: int
    url: str | None
    started_at: float
    tick_at: float
    state: SidecarState
    reason: str | None
    enabled: bool
    settings: dict[str, Any]
    engine_step: int
    groups: list[GroupAnswer]
    uncovered: list[UncoveredBuffer]
    last_incident: Incident | None
    incidents_total: int
    sweeps: list[SweepAnswer]
    drills: list[Drill]
    drills_total: list[DrillCount]
    errors: dict[str, int]
    last_errors: list[str]
    kernel_seconds: dict[str, float]
    hook_seconds: dict[str, float]
    memory_bytes: dict[str, int]
    budget_bytes_per_second: float
    read_bandwidth_bytes_per_second: float
    warnings: list[str]

    @classmethod
    def of(cls, snapshot: Snapshot) -> StatusAnswer:
        return cls.model_validate(
            _attributes(cls, snapshot)
            | {
                "settings": snapshot.settings.as_json(),
                "groups": [GroupAnswer.of(group) for group in snapshot.groups],
                "last_incident": snapshot.incidents[-1] if snapshot.incidents else None,
                "sweeps": [SweepAnswer.of(sweep) for sweep in snapshot.sweeps],
                "drills_total": [
                    DrillCount(kind=kind, result=result, count=count)
                    for (kind, result), count in snapshot.drills_total.items()
                ],
            }
        )


def _attributes(model: type[BaseModel], source: object) -> dict[str, Any]:
    """What `source` has of the model's fields, by name."""
    return {name: getattr(source, name) for name in model.model_fields if hasattr(source, name)}
