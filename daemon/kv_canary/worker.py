"""What the canary thread does for one page-number space each tick: apply events, report violations, carry out work.

Work that cannot be done now (a fence is ahead, the slice of this tick is used up, the engine has taken its memory away)
is kept and done in a later tick, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kv_canary.findings import Finding
from kv_canary.guard import GroupGuard, Space
from kv_canary.ledger import Manifest, Work
from kv_canary.ledger.manifest import Copies, PageCopy
from kv_canary.reporter import Reporter

PIECE_SECONDS = 100e-6
SLICE_SECONDS = 0.01  # of one tick; what is left is done in the next one
FRESH_SECONDS = (
    1.0  # a claimed page that was verified this recently is not read again: hot prefixes are claimed all the time
)
ADOPT_PAGES = 4096
PATIENCE_SECONDS = 10.0  # for a manifest of another ledger; by then that one will not fill it any more

PageArray = npt.NDArray[np.int64]
Reading = Callable[[], AbstractContextManager[bool]]
Worth = Callable[[PageArray, PageArray], npt.NDArray[np.bool_]]


class Pending:
    """Pages of one kind of work, put together: under load many small pieces become a few launches."""

    def __init__(self) -> None:
        self._works: list[Work] = []

    def __bool__(self) -> bool:
        return bool(self._works)

    def add(self, work: Work) -> None:
        self._works.append(work)

    def keep(self, worth: Callable[[PageArray, PageArray], npt.NDArray[np.bool_]]) -> None:
        """Drops the pages that `worth(pages, generations)` is false for."""
        works, self._works = self._works, []
        if works:
            pages = np.concatenate([work.pages for work in works])
            generations = np.concatenate([work.generations for work in works])
            self._put(works[0], pages, generations, worth(pages, generations))

    def first(self, count: int) -> Work:
        """The first `count` pages; they stay until they are `done`. After `keep`."""
        work = self._works[0]
        return replace(work, pages=work.pages[:count], generations=work.generations[:count])

    def done(self, count: int) -> None:
        work = self._works.pop(0)
        self._put(work, work.pages, work.generations, np.arange(len(work.pages)) >= count)

    def _put(self, work: Work, pages: PageArray, generations: PageArray, kept: npt.NDArray[np.bool_]) -> None:
        if kept.any():
            self._works.insert(0, replace(work, pages=pages[kept], generations=generations[kept]))


class SpaceWorker:
    """Keeps one `Space` up to date. Claims and seals are never put off for the budget, and claims come first."""

    def __init__(
        self,
        space: Space,
        reporter: Reporter,
        *,
        reading: Reading,
        breathe: Callable[[], None],
        launch_bytes: Callable[[], int],
        monotonic: Callable[[], float],
    ) -> None:
        self.space = space
        self._reporter = reporter
        self._reading = reading
        self._breathe = breathe
        self._launch_bytes = launch_bytes
        self._monotonic = monotonic
        self._takes = Pending()
        self._claims = Pending()
        self._waiting: deque[tuple[float, Work]] = deque()  # admitted pages whose manifest another ledger has to fill

    def run(self) -> bool:
        """One slice; true when there is more to do at once."""
        until = self._monotonic() + SLICE_SECONDS
        caught_up = False
        while not caught_up and self._monotonic() < until:
            caught_up = self.space.ledger.catch_up(seconds=PIECE_SECONDS)  # touches no engine memory
            self._breathe()
        until = self._monotonic() + SLICE_SECONDS
        with self._reading() as allowed:
            if allowed:
                self._report()
        collected = self._collect(until)
        self._admit_waiting()
        claimed = self._each_launch(self._claims, self._is_due, self._claim, until)
        taken = self._each_launch(self._takes, self._is_missing, self._take, until)
        return self._adopt() or not (collected and claimed and taken and caught_up)

    def _report(self) -> None:
        for violation in self.space.ledger.take_violations():
            if self.space.gate.recording:
                self._reporter.violation(self.space, violation)

    def _collect(self, until: float) -> bool:
        """Takes over what events left, as far as the first fence that is still ahead; false if time was up before."""
        while True:
            with self._reading() as allowed:
                work = self._next_in_order() if allowed else None
            if work is None:
                return True
            # what is copied, here or to a tier, is fingerprinted before it
            if not self._each_launch(self._takes, self._is_missing, self._take, until) or not self._carry_out(work):
                return False
            self.space.held = None
            self._breathe()

    def _carry_out(self, work: Work) -> bool:
        """Work that what comes after it must not overtake; false if the engine has taken its memory away."""
        if work.kind == "export":
            return self._export(work)
        if work.kind == "admit":
            if work.manifest is not None and work.manifest.pending:
                self._waiting.append((self._monotonic() + PATIENCE_SECONDS, work))
                return True
            left = self._admit(work)
            self.space.held = left or work
            return left is None
        with self._reading() as allowed:
            if allowed:
                for guard in self._active():
                    guard.verifier.move(work)
            return allowed

    def _export(self, work: Work) -> bool:
        """Fills the manifest from the baseline; pages that are still there are read again on the way out."""
        manifest, pages, identities = work.manifest, work.pages, work.identities
        assert manifest is not None
        copies: list[PageCopy | None] = [None] * len(pages)
        for start in range(0, len(pages), step := self._pages_a_launch()):
            rows = np.arange(start, min(start + step, len(pages)))
            with self._reading() as allowed:
                if not allowed:
                    return False
                for guard in self._active():
                    own = rows[guard.verifier.shapes(pages[rows])]
                    self._report_all(guard, guard.verifier.verify(np.unique(pages[own]), "transfer"))
                    left = guard.transfers.describe(pages[own], work.generations[own], identities[own])
                    for row, copy in zip(own, left, strict=True):
                        copies[row] = copy
            self._breathe()
        manifest.fill(tuple(copies))
        return True

    def _admit(self, work: Work) -> Work | None:
        """Holds pages that came from a tier against what left; returns what is left to do, None if nothing is."""
        pages, told = work.pages, np.zeros(len(work.pages), np.int64)
        if work.identities is not None:
            told[:] = work.identities
        copies = _rows_of(work.manifest, len(pages))
        for start in range(0, len(pages), step := self._pages_a_launch()):
            rows = np.arange(start, min(start + step, len(pages)))
            with self._reading() as allowed:
                if not allowed:
                    return _from(work, start)
                for guard in self._active():
                    own = rows[guard.verifier.shapes(pages[rows])]
                    came = tuple(copies[row] for row in own)
                    self._report_all(guard, guard.transfers.judge(pages[own], work.generations[own], came, told[own]))
            self._breathe()
        return None

    def _admit_waiting(self) -> None:
        for _ in range(len(self._waiting)):
            until, work = self._waiting.popleft()
            ready = work.manifest is None or not work.manifest.pending or self._monotonic() >= until
            left = self._admit(work) if ready else work
            if left is not None:
                self._waiting.append((until, left))

    def _report_all(self, guard: GroupGuard, findings: list[Finding]) -> None:
        for finding in findings:
            self._reporter.finding(guard, finding)

    def _next_in_order(self) -> Work | None:
        """Takes work over up to the next that has to be done in its place, which is held and returned; None: there is
        none before the end, or before a fence that is ahead.
        """
        while (work := self.space.held or self.space.ledger.take_work()) is not None:
            self.space.held = work
            if work.fence is not None and not work.fence.ready():
                return None
            if work.kind in ("move", "export", "admit"):
                return work
            (self._claims if work.kind == "claim" else self._takes).add(work)
            self.space.held = None
            self._breathe()
        return None

    def _each_launch(self, pending: Pending, worth: Worth, carry_out: Callable[[Work], None], until: float) -> bool:
        """Launch by launch, so that an engine that wants its memory waits for one only; true when none is left."""
        if not pending:
            return True
        with self._reading() as allowed:
            if allowed:
                pending.keep(worth)
        while pending:
            with self._reading() as allowed:
                if not allowed:
                    return False
                count = self._pages_a_launch()
                carry_out(pending.first(count))
                pending.done(count)
            self._breathe()
            if self._monotonic() >= until:
                break
        return not pending

    def _is_missing(self, pages: PageArray, generations: PageArray) -> npt.NDArray[np.bool_]:
        return _any(pages, [guard.verifier.is_missing(pages, generations) for guard in self._active()])

    def _is_due(self, pages: PageArray, generations: PageArray) -> npt.NDArray[np.bool_]:
        """Claimed pages, each once, that were not verified a moment ago."""
        first = np.zeros(len(pages), np.bool_)
        first[np.unique(pages, return_index=True)[1]] = True
        return first & _any(pages, [guard.verifier.is_older(pages, FRESH_SECONDS) for guard in self._active()])

    def _take(self, work: Work) -> None:
        for guard in self._active():
            guard.verifier.take(*guard.verifier.missing(work.pages, work.generations))

    def _claim(self, work: Work) -> None:
        for guard in self._active():
            pages = work.pages[guard.verifier.is_older(work.pages, FRESH_SECONDS)]
            self._report_all(guard, guard.verifier.verify(pages, "claim"))

    def _active(self) -> list[GroupGuard]:
        return [guard for guard in self.space.guards if guard.active]

    def _pages_a_launch(self) -> int:
        size = sum(guard.group.bytes_per_page for guard in self.space.guards)
        return max(1, self._launch_bytes() // max(1, size))

    def _adopt(self) -> bool:
        """Fingerprints what was sealed while a group was off, some pages a tick; true while there is more.

        Not while work is held back by its fence: a page may be sealed in the table, and its last write still ahead.
        """
        if self.space.held is not None:
            return False
        for guard in self.space.guards:
            if guard.active and guard.adopting is not None:
                step = max(1, min(ADOPT_PAGES, self._launch_bytes() // max(1, guard.group.bytes_per_page)))
                stop = min(guard.adopting + step, guard.group.pages)
                with self._reading() as allowed:
                    if not allowed:
                        return False
                    guard.verifier.seal_missing(guard.adopting, stop)
                guard.adopting = stop if stop < guard.group.pages else None
                return True
        return False


def _from(work: Work, start: int) -> Work:
    """An admit without its first `start` pages: each is judged once."""
    manifest, told = work.manifest, work.identities
    count = len(work.pages)
    return replace(
        work,
        pages=work.pages[start:],
        generations=work.generations[start:],
        identities=told if told is None else np.broadcast_to(told, count)[start:],
        manifest=manifest.part(range(start, count)) if manifest is not None and len(manifest) == count else None,
    )


def _rows_of(manifest: Manifest | None, count: int) -> Copies:
    """An entry a page; nothing is known of pages whose manifest was never filled, or is one of other pages."""
    if manifest is None or manifest.pending or len(manifest) != count:
        return (None,) * count
    return manifest.copies


def _any(pages: PageArray, masks: list[npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_]:
    """Pages that any of the groups wants; none without a group that may be read."""
    return np.logical_or.reduce(masks) if masks else np.zeros(len(pages), np.bool_)
