"""What the canary thread does for one page-number space each tick: apply events, report violations, carry out work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kv_canary.guard import GroupGuard, Space
from kv_canary.ledger import Work
from kv_canary.reporter import Reporter

PIECE_SECONDS = 100e-6
SLICE_SECONDS = 0.01  # of one tick; what is left is done in the next one
FRESH_SECONDS = (
    1.0  # a claimed page that was verified this recently is not read again: hot prefixes are claimed all the time
)
ADOPT_PAGES = 4096


class Batch:
    """Work of one kind, put together: under load many small pieces become one, and the stale ones fall out."""

    def __init__(self) -> None:
        self._works: list[Work] = []

    def add(self, work: Work) -> None:
        self._works.append(work)

    def drain(self) -> Work | None:
        works, self._works = self._works, []
        if len(works) < 2:
            return works[0] if works else None
        return replace(
            works[0],
            pages=np.concatenate([work.pages for work in works]),
            generations=np.concatenate([work.generations for work in works]),
        )


class SpaceWorker:
    """Keeps one `Space` up to date. Seals and claims are never put off for the budget."""

    def __init__(
        self,
        space: Space,
        reporter: Reporter,
        *,
        breathe: Callable[[], None],
        launch_bytes: Callable[[], int],
        monotonic: Callable[[], float],
    ) -> None:
        self.space = space
        self._reporter = reporter
        self._breathe = breathe
        self._launch_bytes = launch_bytes
        self._monotonic = monotonic

    def run(self) -> bool:
        """One slice; true when there is more to do at once."""
        until = self._monotonic() + SLICE_SECONDS
        caught_up = False
        while not caught_up and self._monotonic() < until:
            caught_up = self.space.ledger.catch_up(seconds=PIECE_SECONDS)
            self._breathe()
        for violation in self.space.ledger.take_violations():
            if self.space.gate.recording:
                self._reporter.violation(self.space, violation)
        takes, claims = Batch(), Batch()
        while (work := self.space.held or self.space.ledger.take_work()) is not None:
            self.space.held = None
            if work.fence is not None and not work.fence.ready():
                self.space.held = work
                break
            if work.kind == "move":
                self._take(takes.drain())  # sources first
                self._move(work)
            else:
                (claims if work.kind == "claim" else takes).add(work)
            self._breathe()
        self._take(takes.drain())
        self._claim(claims.drain())
        return self._adopt() or not caught_up

    def _take(self, work: Work | None) -> None:
        if work is None:
            return
        for guard in self._active():
            pages, generations = guard.verifier.missing(work.pages, work.generations)
            for part in self._launches(guard, len(pages)):
                guard.verifier.take(pages[part], generations[part])
                self._breathe()

    def _claim(self, work: Work | None) -> None:
        if work is None:
            return
        claimed = np.unique(work.pages)
        for guard in self._active():
            pages = guard.verifier.older_than(claimed, FRESH_SECONDS)
            for part in self._launches(guard, len(pages)):
                for finding in guard.verifier.verify(pages[part], "claim"):
                    self._reporter.finding(guard, finding)
                self._breathe()

    def _move(self, work: Work) -> None:
        for guard in self._active():
            guard.verifier.move(work)

    def _active(self) -> list[GroupGuard]:
        return [guard for guard in self.space.guards if guard.active]

    def _launches(self, guard: GroupGuard, count: int) -> list[slice]:
        step = max(1, self._launch_bytes() // max(1, guard.group.bytes_per_page))
        return [slice(start, start + step) for start in range(0, count, step)]

    def _adopt(self) -> bool:
        """Fingerprints what was sealed while a group was off, some pages a tick; true while there is more."""
        for guard in self.space.guards:
            if guard.active and guard.adopting is not None:
                step = max(1, min(ADOPT_PAGES, self._launch_bytes() // max(1, guard.group.bytes_per_page)))
                stop = min(guard.adopting + step, guard.group.pages)
                guard.verifier.seal_missing(guard.adopting, stop)
                guard.adopting = stop if stop < guard.group.pages else None
                return True
        return False
