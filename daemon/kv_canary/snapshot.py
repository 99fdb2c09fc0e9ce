"""What the rest of the world may know: one immutable document, published by the canary thread by assignment.

The HTTP thread, the metrics collector and the command line read only this. Nothing in it refers to a tensor or to a
live object of the canary thread, so a reader can keep it as long as it likes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kv_canary.settings import Settings

Check = Literal["content", "free_page", "identity", "ownership", "transfer", "layout"]
Persistence = Literal["persistent", "transient", "changing"]
Source = Literal["real", "drill"]
Purpose = Literal["seal", "sweep", "confirm", "claim", "transfer", "drill"]
GroupKind = Literal["full", "swa", "mla", "indexer", "state", "host"]
DrillKind = Literal["fingerprint", "content"]
DrillResult = Literal["running", "detected", "missed", "superseded"]
SidecarState = Literal["waiting", "running", "disabled", "failed", "stopped"]

CHECKS: tuple[Check, ...] = ("content", "free_page", "identity", "ownership", "transfer", "layout")
PERSISTENCES: tuple[Persistence, ...] = ("persistent", "transient", "changing")
SOURCES: tuple[Source, ...] = ("real", "drill")
PURPOSES: tuple[Purpose, ...] = ("seal", "sweep", "confirm", "claim", "transfer", "drill")
PAGE_STATES = ("unknown", "open", "sealed", "free", "loading")
SWEEP_RESULTS = ("clean", "mismatch", "interrupted")
TRANSFER_RESULTS = ("verified", "mismatch", "skipped")
DRILL_KINDS: tuple[DrillKind, ...] = ("fingerprint", "content")
DRILL_RESULTS = ("detected", "missed", "superseded")
SWEEP_DURATION_BUCKETS = (0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UncoveredBuffer:
    """Something of a pool that is not checked, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeFinding:
    """One stripe of a page whose fingerprint was not the expected one. Fingerprints are 16 hexadecimal digits."""

    stripe: int
    name: str
    layers: tuple[int, ...]
    expected: str
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A check that failed and was confirmed.

    Times are seconds since 1970; steps count the engine's steps since attach. `counted` says whether the mismatch
    counter has it: a drill is in it only if it was posted with an alert. `page` is the page found first; `neighbours`
    are others that went bad in the same way at nearly the same time, the lowest numbers if there are many, and
    `pages_total` counts all of them, as the mismatch counter does.
    """

    id: str
    source: Source
    group: str
    page: int
    check: Check
    persistence: Persistence
    stripes: tuple[StripeFinding, ...]
    layers: tuple[int, ...]
    page_state: str
    owner: str | None
    previous_owner: str | None
    owners: int
    last_good_at: float | None
    found_at: float
    engine_step: int
    changed_step: int
    cause: str
    summary: str
    reaction: str
    drill: str | None = None
    counted: bool = True
    neighbours: tuple[int, ...] = ()
    pages_total: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """A fault injected on purpose. `seconds` runs from injection to detection; `page` is None until one is chosen."""

    id: str
    kind: DrillKind
    group: str
    automatic: bool
    alert: bool
    result: DrillResult
    started_at: float
    page: int | None = None
    stripe: int | None = None
    seconds: float | None = None
    incident: str | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """A sweep that somebody asked for, over all its groups.

    Every page is scanned; those that are sealed or free are verified.
    """

    id: str
    groups: tuple[str, ...]
    state: Literal["running", "finished", "interrupted"]
    started_at: float
    finished_at: float | None
    scanned_pages: int
    verified_pages: int
    total_pages: int
    mismatches: int

    @property
    def progress(self) -> float:
        return 1.0 if self.state == "finished" else min(1.0, self.scanned_pages / max(1, self.total_pages))


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepProgress:
    """Where the running pass over a group stands.

    `position` counts pages of `total`; `eta_seconds` is to the pass's end.
    """

    position: int
    total: int
    started_at: float | None
    eta_seconds: float | None
    last_finished_at: float | None
    last_duration_seconds: float | None
    deadline_met: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounters:
    """Totals since attach."""

    mismatches: Mapping[tuple[Check, Persistence, Source], int]
    read_bytes: Mapping[Purpose, int]
    verified_pages: int
    sealed_pages: int
    claims: int
    claims_not_covered: int
    superseded: int
    sweeps: Mapping[str, int]
    sweep_duration_buckets: tuple[int, ...]
    sweep_duration_sum: float
    transfers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSnapshot:
    """One canary group."""

    name: str
    kind: GroupKind
    enabled: bool
    disabled_reason: str | None
    total_pages: int
    pages: Mapping[str, int]
    bytes_per_page: int
    buffers: int
    stripes: int
    coverage: str
    uncovered: tuple[UncoveredBuffer, ...]
    layout_signature: str
    kv_token_id_vs_position_offset: int
    sweep: SweepProgress
    oldest_verification_age_seconds: float
    counters: GroupCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMap:
    """Every page of a group at one moment, one byte a cell of `pages_per_cell` pages in a row.

    A byte holds the age class in bits 0 to 2, the state's place in `states` in bits 3 to 5, and two flags: 64, an
    incident of a drill names a page of the cell; 128, one that is no drill's does. The larger byte is the worse page,
    and a cell shows its worst. An age class is how many of `age_bounds_seconds` have passed since the page was last
    seen good; 7 is a page that is not verified now. `counts` are pages by state and age class, the last entry of each
    being those without an age.
    """

    group: str
    built_at: float
    first_page: int
    pages: int
    pages_per_cell: int
    states: tuple[str, ...]
    age_bounds_seconds: tuple[float, ...]
    counts: Mapping[str, tuple[int, ...]]
    mismatched_pages: int
    drilled_pages: int
    cells: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PageDetails:
    """One page at one moment. `age_seconds` is None while the page is not verified."""

    group: str
    page: int
    state: str
    generation: int
    owner: str | None
    previous_owner: str | None
    owners: int
    changed_step: int
    age_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The whole sidecar at one moment."""

    version: str
    engine: str
    engine_version: str
    device: str
    pid: int
    rank: int
    url: str | None
    started_at: float
    tick_at: float
    tick_monotonic: float  # the same moment on the clock that nobody sets: how long ago it was, in this process only
    state: SidecarState
    reason: str | None
    enabled: bool
    settings: Settings
    engine_step: int
    groups: tuple[GroupSnapshot, ...]
    uncovered: tuple[UncoveredBuffer, ...]
    incidents: tuple[Incident, ...]
    incidents_total: int
    sweeps: tuple[SweepRequest, ...]
    drills: tuple[Drill, ...]
    drills_total: Mapping[tuple[DrillKind, str], int]
    errors: Mapping[str, int]
    last_errors: tuple[str, ...]
    kernel_seconds: Mapping[str, float]
    hook_seconds: Mapping[str, float]
    memory_bytes: Mapping[str, int]
    budget_bytes_per_second: float
    read_bandwidth_bytes_per_second: float
    warnings: tuple[str, ...] = field(default=())

    def group(self, name: str) -> GroupSnapshot | None:
        return next((group for group in self.groups if group.name == name), None)
