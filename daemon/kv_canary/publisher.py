"""Publisher: surveys the groups and builds the snapshot.

Used by the canary thread alone; the snapshot is for everyone.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from kv_canary._version import __version__
from kv_canary.drills import Drills
from kv_canary.gate import EngineGate
from kv_canary.guard import GroupGuard, Space
from kv_canary.incidents import IncidentLog
from kv_canary.ledger import FREE, SEALED
from kv_canary.scrubber import Scrubber
from kv_canary.settings import Settings
from kv_canary.snapshot import (
    PAGE_STATES,
    PURPOSES,
    GroupSnapshot,
    SidecarState,
    Snapshot,
    SweepProgress,
    UncoveredBuffer,
)
from kv_canary.suspension import Suspension

FIRST_LINES = 8  # of the log, a component
SURVEY_PAGES = 16_384  # pages surveyed between two releases of the GIL

__all__ = ["Errors", "Publisher", "Subject"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Who is guarded."""

    engine: str
    engine_version: str
    rank: int = 0
    device: str = "cpu"


@dataclass(slots=True)
class Errors:
    """Failures of the canary itself, by component; the newest few in words."""

    counts: dict[str, int] = field(default_factory=dict)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    _texts: dict[str, int] = field(default_factory=dict)

    def count(self, component: str, text: str) -> bool:
        """True when this is worth a log line: its text is not among the newest.

        Texts may differ every time (a page, an address, a path); so beyond the first lines of a component there is one
        whenever their number has doubled.
        """
        self.counts[component] = self.counts.get(component, 0) + 1
        line = f"{component}: {text}"
        if line in self.last:
            return False
        self.last.append(line)
        number = self._texts[component] = self._texts.get(component, 0) + 1
        return number <= FIRST_LINES or number & (number - 1) == 0


class Publisher:
    """Builds snapshots from what the canary thread holds."""

    def __init__(
        self,
        *,
        spaces: Sequence[Space],
        guards: Sequence[GroupGuard],
        gates: Sequence[EngineGate],
        scrubber: Scrubber,
        drills: Drills,
        incidents: IncidentLog,
        errors: Errors,
        suspension: Suspension,
        time: Callable[[], float],
        monotonic: Callable[[], float],
        breathe: Callable[[], None],
    ) -> None:
        self._spaces = spaces
        self._guards = guards
        self._gates = gates
        self._scrubber = scrubber
        self._drills = drills
        self._incidents = incidents
        self._errors = errors
        self._suspension = suspension
        self._time = time
        self._monotonic = monotonic
        self._breathe = breathe
        self._started_at = time()

    def survey(self) -> None:
        """Counts page states and finds the oldest verification of every group, piece by piece.

        What could not be read while the engine had taken its memory away is not held against anybody: that time is left
        out of the age. A survey that runs into such a time is given up, and the last one stands.
        """
        for guard in self._guards:
            counts = np.zeros(len(PAGE_STATES), np.int64)
            oldest, first, pages = 0.0, guard.group.first_page, guard.group.pages
            if not guard.gate.recording:
                guard.state_counts, guard.oldest_age = (pages - first, 0, 0, 0, 0), 0.0
                continue
            for start in range(first, pages, SURVEY_PAGES):
                with self._suspension.reading() as allowed:  # a device's ledger is read on the device
                    if not allowed:
                        return
                    stop = min(start + SURVEY_PAGES, pages)
                    counts += np.bincount(guard.ledger.states(start, stop), minlength=len(PAGE_STATES))
                    if guard.active:
                        oldest = max(oldest, guard.verifier.oldest_age(start, stop))
                    guard.claims_not_covered = guard.ledger.claims_not_covered
                self._breathe()
            guard.state_counts = tuple(int(count) for count in counts)  # type: ignore[assignment]
            guard.oldest_age = oldest - self._suspension.seconds_within(oldest)

    def build(
        self,
        *,
        subject: Subject,
        settings: Settings,
        state: SidecarState,
        reason: str | None,
        enabled: bool,
        url: str | None,
        uncovered: tuple[UncoveredBuffer, ...],
        notices: Sequence[str] = (),
    ) -> Snapshot:
        rate, suspended = self._scrubber.rate, ", ".join(self._suspension.reasons)
        pass_bytes = sum(
            (guard.state_counts[SEALED] + guard.state_counts[FREE]) * guard.group.bytes_per_page
            for guard in self._guards
            if guard.active
        )
        pass_seconds = pass_bytes / rate if rate else float("inf")
        groups = tuple(self._group(guard, settings, rate, pass_seconds) for guard in self._guards)
        return Snapshot(
            version=__version__,
            engine=subject.engine,
            engine_version=subject.engine_version,
            device=subject.device,
            pid=os.getpid(),
            rank=subject.rank,
            url=url,
            started_at=self._started_at,
            tick_at=self._time(),
            tick_monotonic=self._monotonic(),
            state=state,
            reason=reason or (f"suspended: {suspended}" if suspended else None),
            enabled=enabled,
            settings=settings,
            engine_step=max((gate.steps for gate in self._gates), default=0),
            groups=groups,
            uncovered=uncovered,
            incidents=self._incidents.published(),
            incidents_total=self._incidents.total,
            sweeps=tuple(self._scrubber.requests.values()),
            drills=self._drills.published(),
            drills_total=MappingProxyType(dict(self._drills.totals)),
            errors=MappingProxyType(dict(self._errors.counts)),
            last_errors=tuple(self._errors.last),
            kernel_seconds=self._kernel_seconds(),
            hook_seconds=self._hook_seconds(),
            memory_bytes=MappingProxyType(
                {
                    "ledger": sum(space.ledger.nbytes for space in self._spaces),
                    "fingerprints": sum(guard.verifier.nbytes for guard in self._guards),
                }
            ),
            budget_bytes_per_second=rate,
            read_bandwidth_bytes_per_second=self._scrubber.read_bandwidth,
            warnings=(
                *notices,
                *([f"nothing is read, the engine asked for it: {suspended}"] if suspended else ()),
                *self._warnings(settings, rate, pass_bytes, pass_seconds),
            ),
        )

    def _group(self, guard: GroupGuard, settings: Settings, rate: float, pass_seconds: float) -> GroupSnapshot:
        group, states = guard.group, guard.state_counts
        left = 1 - guard.position / max(1, group.pages)
        own_bytes = (states[SEALED] + states[FREE]) * group.bytes_per_page
        late = guard.oldest_age > settings.sweep_deadline or (pass_seconds > settings.sweep_deadline and rate > 0)
        return GroupSnapshot(
            name=group.name,
            kind=group.kind,
            enabled=guard.enabled,
            disabled_reason=guard.disabled_reason,
            total_pages=group.pages - group.first_page,
            pages=MappingProxyType(dict(zip(PAGE_STATES, states, strict=True))),
            bytes_per_page=group.bytes_per_page,
            buffers=len(group.buffers),
            stripes=len(group.stripes),
            coverage=group.coverage,
            uncovered=group.uncovered,
            layout_signature=group.layout_signature,
            kv_token_id_vs_position_offset=group.kv_token_id_vs_position_offset,
            sweep=SweepProgress(
                position=guard.position,
                total=group.pages,
                started_at=guard.sweep_started_at,
                eta_seconds=left * own_bytes / rate if rate and guard.active else None,
                last_finished_at=guard.last_finished_at,
                last_duration_seconds=guard.last_duration,
                deadline_met=not late or not guard.active,
            ),
            oldest_verification_age_seconds=guard.oldest_age,
            counters=guard.verifier.counters.frozen(
                claims=guard.ledger.claims, claims_not_covered=guard.claims_not_covered
            ),
        )

    def _warnings(self, settings: Settings, rate: float, pass_bytes: int, pass_seconds: float) -> tuple[str, ...]:
        warnings = []
        if rate and pass_seconds > settings.sweep_deadline:
            needed = pass_bytes / settings.sweep_deadline
            warnings.append(
                f"the budget of {settings.budget} ({rate / 1e9:.3g} GB/s) needs {pass_seconds:.0f} s for a sweep; "
                f"the deadline of {settings.sweep_deadline:g} s needs {needed / 1e9:.3g} GB/s"
            )
        if not rate:
            warnings.append("background sweeps are off (budget off)")
        if settings.coverage != "all":
            warnings.append(f"coverage is {settings.coverage}: not every byte of a page is checked")
        warnings.extend(
            f"group {guard.group.name} is off: {guard.disabled_reason or 'switched off'}"
            for guard in self._guards
            if not guard.enabled
        )
        return tuple(warnings)

    def _kernel_seconds(self) -> Mapping[str, float]:
        total = dict.fromkeys(PURPOSES, 0.0)
        for guard in self._guards:
            for purpose in PURPOSES:
                total[purpose] += guard.verifier.counters.kernel_seconds[purpose]
        return MappingProxyType({str(purpose): seconds for purpose, seconds in total.items()})

    def _hook_seconds(self) -> Mapping[str, float]:
        total: dict[str, float] = {}
        for gate in self._gates:
            for event, seconds in list(gate.hook_seconds.items()):
                total[event] = total.get(event, 0.0) + seconds
        return MappingProxyType(total)
