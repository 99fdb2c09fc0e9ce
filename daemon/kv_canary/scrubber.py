"""Scrubber: which pages are verified next, and when. Used by the canary thread alone.

The background pass walks all pages of all groups in address order, round and round, so the page verified longest ago is
always next. Passes that somebody asked for come first; they keep the same pace, and a positive one even if the budget
is off. Pausing keeps every position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kv_canary.budget import TokenBucket
from kv_canary.findings import Finding
from kv_canary.guard import GroupGuard
from kv_canary.settings import Budget
from kv_canary.snapshot import SweepRequest

LAUNCH_SECONDS = 0.001  # of reading: work in front never waits longer
CPU_LAUNCH_SECONDS = 0.002  # nobody queues behind a CPU launch, and longer ones jump less between tensors
SCAN_PAGES = 16_384  # page numbers looked through in one launch
EMPTY_PASS_SECONDS = 0.5  # pause after a pass that found nothing to read
REQUESTED_SHARE = 0.01  # of the read bandwidth, for requested sweeps while the budget is off

Report = Callable[[GroupGuard, Finding], bool]
"""Takes a finding; true when it is a mismatch that this sweep should count (a drill's is not)."""


@dataclass(slots=True, kw_only=True)
class _Pass:
    guard: GroupGuard
    position: int
    started: float
    started_at: float
    read_pages: int = 0
    mismatches: int = 0
    request: str | None = None


def launch_seconds(guard: GroupGuard) -> float:
    return CPU_LAUNCH_SECONDS if guard.group.device.type == "cpu" else LAUNCH_SECONDS


class Scrubber:
    """Sweeps the groups of `guards` (a list that may grow)."""

    def __init__(
        self,
        guards: list[GroupGuard],
        *,
        budget: Budget,
        read_bandwidth: float,
        monotonic: Callable[[], float],
        time: Callable[[], float],
    ) -> None:
        self._guards = guards
        self._monotonic = monotonic
        self._time = time
        self.read_bandwidth = read_bandwidth
        self._budget = budget
        self._bucket = TokenBucket(budget.resolve(read_bandwidth), monotonic())
        self._requested: deque[_Pass] = deque()
        self._background: _Pass | None = None
        self._turn = -1
        self._idle_until = 0.0
        self.requests: dict[str, SweepRequest] = {}

    # Pace

    def set_budget(self, budget: Budget, read_bandwidth: float) -> None:
        self._budget, self.read_bandwidth = budget, read_bandwidth
        self._bucket.set_rate(budget.resolve(read_bandwidth), self._monotonic())

    @property
    def rate(self) -> float:
        """Bytes a second of the background sweep."""
        return self._budget.resolve(self.read_bandwidth)

    @property
    def launch_bytes(self) -> int:
        return max(1, int(self.read_bandwidth * min(map(launch_seconds, self._guards), default=LAUNCH_SECONDS)))

    def delay(self) -> float:
        """Seconds until `advance` has something to do."""
        now = self._monotonic()
        if self._requested:
            self._bucket.set_rate(self.rate or REQUESTED_SHARE * self.read_bandwidth, now)
            return self._bucket.delay(now)
        if not any(guard.active for guard in self._guards):
            return float("inf")
        self._bucket.set_rate(self.rate, now)
        return max(self._bucket.delay(now), self._idle_until - now)

    # Requests

    def request(self, request_id: str, guards: list[GroupGuard]) -> SweepRequest:
        now, at = self._monotonic(), self._time()
        request = SweepRequest(
            id=request_id,
            groups=tuple(guard.group.name for guard in guards),
            state="running",
            started_at=at,
            finished_at=None,
            scanned_pages=0,
            verified_pages=0,
            total_pages=sum(guard.group.pages for guard in guards),
            mismatches=0,
        )
        self.requests[request_id] = request
        while len(self.requests) > 100:
            del self.requests[next(iter(self.requests))]
        for guard in guards:
            self._requested.append(_Pass(guard=guard, position=0, started=now, started_at=at, request=request_id))
        return request

    def interrupt(self) -> None:
        """Ends requested sweeps (the canary was switched off); the background pass keeps its position."""
        for one in list(self._requested):
            self._finish(one, "interrupted")
        self._requested.clear()

    def swept_now(self) -> list[GroupGuard]:
        """The group that the next launch reads, if a pass is under way."""
        one = self._requested[0] if self._requested else self._background
        return [one.guard] if one is not None else []

    def drop_background(self) -> None:
        """Forgets the running background pass (its group may be gone)."""
        self._background = None
        self._turn = -1

    # Sweep

    def advance(self, report: Report) -> int:
        """One launch of about a millisecond, if one is due; returns the bytes read."""
        if self.delay() > 0:
            return 0
        one = self._next_pass()
        if one is None:
            return 0
        guard = one.guard
        if not guard.active:
            if one.request is not None:
                self._requested.popleft()
                self._finish(one, "interrupted")
            else:
                self._background = None
            return 0
        findings, read_pages, position = self._verify(one)
        size = read_pages * guard.group.bytes_per_page
        self._bucket.spend(size)
        one.read_pages += read_pages
        self._note_progress(one, scanned=position - one.position, verified=read_pages)
        one.position = guard.position = position
        one.mismatches += sum(report(guard, finding) for finding in findings)
        if position >= guard.group.pages:
            if one.request is not None:
                self._requested.popleft()
            else:
                self._background = None
            self._finish(one, "mismatch" if one.mismatches else "clean")
        return size

    def _verify(self, one: _Pass) -> tuple[list[Finding], int, int]:
        """Findings of one launch, the pages read for them, and the position behind them."""
        group, verifier = one.guard.group, one.guard.verifier
        wanted = max(1, self.launch_bytes // max(1, group.bytes_per_page))
        stop = min(one.position + SCAN_PAGES, group.pages)
        if verifier.by_range:
            stop = min(one.position + wanted, stop)  # all of them may be read
            return (*verifier.verify_range(one.position, stop, "sweep"), stop)
        pages = verifier.select(one.position, stop)
        if len(pages) > wanted:
            pages = pages[:wanted]
            stop = int(pages[-1]) + 1
        return verifier.verify(pages, "sweep"), len(pages), stop

    def _next_pass(self) -> _Pass | None:
        if self._requested:
            return self._requested[0]
        if self._background is None:
            for guard in self._rotation():
                if guard.active:
                    position = guard.position if guard.position < guard.group.pages else 0
                    self._background = _Pass(
                        guard=guard, position=position, started=self._monotonic(), started_at=self._time()
                    )
                    guard.sweep_started_at = self._background.started_at
                    break
        return self._background

    def _rotation(self) -> Iterator[GroupGuard]:
        for _ in self._guards:
            self._turn = (self._turn + 1) % len(self._guards)
            yield self._guards[self._turn]

    def _note_progress(self, one: _Pass, *, scanned: int, verified: int) -> None:
        if one.request is not None and (request := self.requests.get(one.request)):
            self.requests[one.request] = replace(
                request,
                scanned_pages=request.scanned_pages + scanned,
                verified_pages=request.verified_pages + verified,
            )

    def _finish(self, one: _Pass, result: str) -> None:
        now = self._monotonic()
        guard = one.guard
        if one.read_pages or one.request is not None:
            guard.verifier.counters.sweep(result, now - one.started)
        if result != "interrupted":
            guard.position = 0
            guard.last_finished_at, guard.last_duration = self._time(), now - one.started
            if not one.read_pages:
                self._idle_until = now + EMPTY_PASS_SECONDS
        if one.request is not None and (request := self.requests.get(one.request)):
            unfinished = any(other.request == one.request and other is not one for other in self._requested)
            state = "interrupted" if result == "interrupted" else "running" if unfinished else "finished"
            self.requests[one.request] = replace(
                request,
                state=state,  # type: ignore[arg-type]
                finished_at=None if state == "running" else self._time(),
                mismatches=request.mismatches + one.mismatches,
            )
