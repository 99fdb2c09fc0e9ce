"""PageMapper: every page of a group in one small value, for a person to look at. Used by the canary thread alone.

The work is bounded: one byte a cell, 65,536 cells at most, built in slices of some thousand pages with a release of the
GIL between them. Nothing is built unless somebody looks.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kv_canary.errors import ConflictError, NotFoundError
from kv_canary.guard import GroupGuard
from kv_canary.incidents import IncidentLog
from kv_canary.snapshot import PAGE_STATES, PageDetails, PageMap
from kv_canary.suspension import Suspension

CELLS = 65_536
SLICE_PAGES = 2_048  # pages looked at between two releases of the GIL
SLICE_INCIDENTS = 256
SUSPENSION_ROUNDS = 8

MAP_STATES = ("elsewhere", "free", "sealed", "open", "loading", "unknown")
"""From harmless to worst. A page that another group of the same memory holds at present is `elsewhere`."""
NO_AGE = 7
AGE_SHARES = (0.25, 0.5, 1.0, 2.0)
"""Bounds of the age classes, in shares of the sweep deadline."""
DRILLED, MISMATCHED = 64, 128

_ELSEWHERE, _UNKNOWN = 0, MAP_STATES.index("unknown")
_PLACE = np.array([MAP_STATES.index(state) for state in PAGE_STATES], np.uint8)


class PageMapper:
    """Builds page maps and page details, and keeps the last map of each group."""

    def __init__(
        self,
        *,
        incidents: IncidentLog,
        suspension: Suspension,
        time: Callable[[], float],
        breathe: Callable[[], None],
    ) -> None:
        self._incidents = incidents
        self._suspension = suspension
        self._time = time
        self._breathe = breathe
        self._last: dict[str, PageMap] = {}

    def map(self, guard: GroupGuard, deadline: float) -> PageMap:
        """The group as it is now. While the engine has taken its memory away: as it was when last looked at, or
        `ConflictError`.
        """
        group = guard.group
        first, pages = group.first_page, group.pages
        each = max(1, -(-(pages - first) // CELLS))
        bounds = tuple(share * deadline for share in AGE_SHARES)
        raw_bounds = tuple(self._with_suspensions(bound) for bound in bounds)
        cells = np.zeros(-(-(pages - first) // each), np.uint8)
        counts = np.zeros(64, np.int64)
        step = max(1, SLICE_PAGES // each) * each
        for start in range(first, pages, step):
            stop = min(start + step, pages)
            with self._suspension.reading() as allowed:  # a device's ledger is read on the device
                if not allowed:
                    return self._last_of(group.name)
                looks = self._looks(guard, start, stop, raw_bounds)
            counts += np.bincount(looks, minlength=64)
            at = (start - first) // each
            if each > 1:
                looks = np.maximum.reduceat(looks, np.arange(0, len(looks), each))
            cells[at : at + len(looks)] = looks
            self._breathe()
        marks = self._marks(group.name, first, pages)
        for page, mark in marks.items():
            cells[(page - first) // each] |= mark
        self._last[group.name] = PageMap(
            group=group.name,
            built_at=self._time(),
            first_page=first,
            pages=pages - first,
            pages_per_cell=each,
            states=MAP_STATES,
            age_bounds_seconds=bounds,
            counts=MappingProxyType(_by_state(counts)),
            mismatched_pages=sum(bool(mark & MISMATCHED) for mark in marks.values()),
            drilled_pages=sum(bool(mark & DRILLED) for mark in marks.values()),
            cells=cells.tobytes(),
        )
        return self._last[group.name]

    def forget(self) -> None:
        """The groups may be others from here on."""
        self._last.clear()

    def details(self, guard: GroupGuard, page: int) -> PageDetails:
        group, verifier = guard.group, guard.verifier
        if not group.first_page <= page < group.pages:
            raise NotFoundError(
                f"group {group.name} has no page {page}; its pages are {group.first_page} to {group.pages - 1}"
            )
        with self._suspension.reading() as allowed:
            if not allowed:
                raise ConflictError(_suspended(self._suspension))
            row = guard.ledger.row(page)
            look = int(self._looks(guard, page, page + 1, ())[0])
            age = verifier.oldest_age(page, page + 1) if look & NO_AGE != NO_AGE else None
        return PageDetails(
            group=group.name,
            page=page,
            state=MAP_STATES[look >> 3],
            generation=row.generation,
            owner=row.owner,
            previous_owner=row.previous_owner,
            owners=row.owners,
            changed_step=row.changed_step,
            age_seconds=None if age is None else age - self._suspension.seconds_within(age),
        )

    def _looks(self, guard: GroupGuard, start: int, stop: int, bounds: tuple[float, ...]) -> npt.NDArray[np.uint8]:
        """State and age class of the pages `start` .. `stop - 1`."""
        if not guard.gate.recording:  # nothing is known of a page while the hooks are silent
            return np.full(stop - start, _UNKNOWN << 3 | NO_AGE, np.uint8)
        states = _PLACE[guard.ledger.states(start, stop)]
        shaped = guard.ledger.group_of(np.arange(start, stop))
        if shaped is not None:
            states[(shaped != guard.verifier.place) & (states != _UNKNOWN)] = _ELSEWHERE
        verified = guard.verifier.select(start, stop)
        older = np.zeros(len(verified), np.uint8)
        for bound in bounds:
            older += guard.verifier.is_older(verified, bound)
        ages = np.full(stop - start, NO_AGE, np.uint8)
        ages[verified - start] = older
        ages |= states * np.uint8(8)
        return ages

    def _with_suspensions(self, age: float) -> float:
        """The age by the clock of a page that is `age` old without the time in which nothing could be read.

        From above: each round leaves out stretches of that time that are older than the page.
        """
        by_clock = age + self._suspension.seconds_within(float("inf"))
        for _ in range(SUSPENSION_ROUNDS):
            if (closer := age + self._suspension.seconds_within(by_clock)) == by_clock:
                break
            by_clock = closer
        return by_clock

    def _marks(self, group: str, first: int, pages: int) -> dict[int, int]:
        """Flags of the pages that incidents name."""
        marks: dict[int, int] = {}
        for index, incident in enumerate(self._incidents.published()):
            if incident.group == group:
                mark = DRILLED if incident.source == "drill" else MISMATCHED
                for page in (incident.page, *incident.neighbours):
                    if first <= page < pages:
                        marks[page] = marks.get(page, 0) | mark
            if index % SLICE_INCIDENTS == 0:
                self._breathe()
        return marks

    def _last_of(self, group: str) -> PageMap:
        if (last := self._last.get(group)) is None:
            raise ConflictError(_suspended(self._suspension))
        return last


def _suspended(suspension: Suspension) -> str:
    return f"nothing can be looked at now, the engine asked for it: {', '.join(suspension.reasons)}"


def _by_state(counts: npt.NDArray[np.int64]) -> dict[str, tuple[int, ...]]:
    table = counts.reshape(8, 8)
    classes = (*range(len(AGE_SHARES) + 1), NO_AGE)
    return {state: tuple(int(table[place, age]) for age in classes) for place, state in enumerate(MAP_STATES)}
