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
        while self._monotonic() < until:
            work = self.space.held or self.space.ledger.take_work()
            self.space.held = None
            if work is None:
                return self._adopt() or not caught_up
            if work.fence is not None and not work.fence.ready():
                self.space.held = work
                return not caught_up
            self._carry_out(work)
            self._breathe()
        return True

    def _carry_out(self, work: Work) -> None:
        for guard in self.space.guards:
            if not guard.active:
                continue
            step = max(1, self._launch_bytes() // max(1, guard.group.bytes_per_page))
            for start in range(0, len(work.pages), step):
                self._piece(guard, work, slice(start, start + step))
                self._breathe()

    def _piece(self, guard: GroupGuard, work: Work, part: slice) -> None:
        if work.kind == "claim":
            pages = np.unique(work.pages[part])
            stale = guard.verifier.older_than(pages, FRESH_SECONDS)
            for finding in guard.verifier.verify(stale, "claim"):
                self._reporter.finding(guard, finding)
            return
        moved = work.sources is not None
        guard.verifier.seal(
            replace(
                work,
                pages=work.pages[part],
                generations=work.generations[part],
                sources=work.sources[part] if moved else None,
                source_generations=work.source_generations[part] if moved else None,
            )
        )

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
