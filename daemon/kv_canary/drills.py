"""Drills: faults injected on purpose, to prove that the alarm works. Used by the canary thread alone.

A drill flips one bit, verifies the page through the same kernel, compare and confirm as any other, and undoes the flip
in the same tick. `fingerprint` flips a stored fingerprint (the canary's own data), `content` a real byte of the pool:
on a page that nobody holds if there is one, for well under a millisecond, and it is put back only while the page is
still the same page.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kv_canary.errors import ConflictError, ForbiddenError
from kv_canary.findings import Finding
from kv_canary.fingerprint import spec
from kv_canary.guard import GroupGuard
from kv_canary.ledger import FREE
from kv_canary.snapshot import DRILL_KINDS, DRILL_RESULTS, Drill, DrillKind, DrillResult

ATTEMPTS = 50  # pages that may be recycled under a drill before it gives up
PATIENCE_SECONDS = 10.0  # how long a drill waits for a page that can be verified
KEPT = 100

Record = Callable[[GroupGuard, Finding, Drill], str | None]
"""Makes the incident of a detected drill and returns its id; None for a drill that leaves none."""


class Drills:
    """Drills requested and done, newest last."""

    def __init__(
        self,
        guards: list[GroupGuard],
        *,
        monotonic: Callable[[], float],
        time: Callable[[], float],
        random_source: random.Random,
    ) -> None:
        self._guards = guards
        self._monotonic = monotonic
        self._time = time
        self._random = random_source
        self._pending: list[tuple[Drill, float, int]] = []
        self._drills: dict[str, Drill] = {}
        self._count = 0
        self.totals: dict[tuple[DrillKind, str], int] = {(k, r): 0 for k in DRILL_KINDS for r in DRILL_RESULTS}

    def request(
        self, kind: DrillKind, group: str | None, *, automatic: bool, alert: bool, content_allowed: bool
    ) -> Drill:
        """Queues a drill; raises `ForbiddenError` or `ConflictError` when it cannot be done."""
        if kind == "content" and not content_allowed:
            raise ForbiddenError(
                "content drills flip a real byte of the cache; allow them with KV_CANARY_ALLOW_CONTENT_DRILLS=on"
            )
        guards = [guard for guard in self._guards if guard.active and group in (None, guard.group.name)]
        if not guards:
            raise ConflictError(f"group {group} is switched off" if group else "no group is switched on")
        if kind == "content" and guards[0].group.device.type != "cpu":
            raise ConflictError("content drills need a pool in CPU memory; use a fingerprint drill")
        self._count += 1
        drill = Drill(
            id=f"drill-{self._count:06d}",
            kind=kind,
            group=guards[0].group.name,
            automatic=automatic,
            alert=alert,
            result="running",
            started_at=self._time(),
        )
        self._pending.append((drill, self._monotonic(), 0))
        self._keep(drill)
        return drill

    def published(self) -> tuple[Drill, ...]:
        return tuple(self._drills.values())

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    def run(self, record: Record) -> None:
        """Tries each pending drill once."""
        pending, self._pending = self._pending, []
        for drill, asked, attempts in pending:
            guard = next((guard for guard in self._guards if guard.group.name == drill.group), None)
            if guard is None or not guard.active:
                self._finish(drill, "superseded", "its group was switched off")
            elif self._attempt(guard, drill, record):
                continue
            elif attempts + 1 >= ATTEMPTS or self._monotonic() - asked > PATIENCE_SECONDS:
                self._finish(
                    drill,
                    "superseded",
                    "no page could be verified long enough; pages are recycled too fast or none is sealed",
                )
            else:
                self._pending.append((drill, asked, attempts + 1))

    def _attempt(self, guard: GroupGuard, drill: Drill, record: Record) -> bool:
        """False when there was no page, or it was recycled in the middle: try again."""
        page = self._choose_page(guard, drill.kind)
        if page is None:
            return False
        stripe = self._random.randrange(len(guard.group.stripes))
        drill = replace(drill, page=page, stripe=stripe)
        started = self._monotonic()
        inject = self._through_fingerprint if drill.kind == "fingerprint" else self._through_content
        outcome = inject(guard, page, stripe)
        if outcome is None:
            return False
        finding, detail = outcome
        if finding is None:
            self._finish(drill, "missed", "the flipped bit was read and not found")
            return True
        seconds = self._monotonic() - started
        detected = replace(drill, result="detected", seconds=seconds)
        self._finish(replace(detected, incident=record(guard, finding, detected)), "detected", detail)
        return True

    def _through_fingerprint(self, guard: GroupGuard, page: int, stripe: int) -> tuple[Finding | None, str] | None:
        verifier, mask = guard.verifier, 1 << self._random.randrange(64)
        generation = int(verifier.ledger.generations(np.array([page]))[0])
        verifier.tamper(page, stripe, mask)
        try:
            findings = verifier.verify(np.array([page]), "drill")
        finally:
            verifier.tamper(page, stripe, mask)
        return self._outcome(guard, page, generation, stripe, findings, "")

    def _through_content(self, guard: GroupGuard, page: int, stripe: int) -> tuple[Finding | None, str] | None:
        from kv_canary.fingerprint.cpu import exchange_byte

        verifier = guard.verifier
        buffer = self._random.choice(guard.group.stripes[stripe].buffers)
        memory, _ = self._random.choice(spec.run_offsets(buffer))
        address = buffer.address + page * buffer.page_stride + memory + self._random.randrange(buffer.run_bytes)
        mask = 1 << self._random.randrange(8)
        live = verifier.ledger.live_generations
        generation = int(live[page])
        before = exchange_byte(live, page, generation, address, mask)
        if before < 0:
            return None
        try:
            findings = verifier.verify(np.array([page]), "drill")
        finally:
            back = exchange_byte(live, page, generation, address, mask, old=before ^ mask)
        detail = (
            "the byte is back" if back >= 0 else "the page was recycled meanwhile: its new owner overwrites the byte"
        )
        return self._outcome(guard, page, generation, stripe, findings, detail)

    def _outcome(
        self, guard: GroupGuard, page: int, generation: int, stripe: int, findings: list[Finding], detail: str
    ) -> tuple[Finding | None, str] | None:
        for finding in findings:
            if stripe in finding.stripes:
                return finding, detail
        moved_on = int(guard.ledger.generations(np.array([page]))[0]) != generation or not guard.active
        return None if moved_on else (None, detail)

    def _choose_page(self, guard: GroupGuard, kind: DrillKind) -> int | None:
        pages = guard.verifier.select(0, guard.group.pages)
        if not len(pages):
            return None
        if kind == "content":
            states = guard.ledger.states(0, guard.group.pages)[pages]
            unheld = [
                int(page) for page in self._sample(pages[states != FREE]) if guard.ledger.row(int(page)).owners == 0
            ]
            free = pages[states == FREE]
            pages = np.array(unheld) if unheld else free if len(free) else pages
        return int(pages[self._random.randrange(len(pages))])

    def _sample(self, pages: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int]:
        return self._random.sample(pages.tolist(), min(64, len(pages)))

    def _finish(self, drill: Drill, result: DrillResult, detail: str) -> None:
        self.totals[(drill.kind, result)] += 1
        self._keep(replace(drill, result=result, detail=detail))

    def _keep(self, drill: Drill) -> None:
        self._drills[drill.id] = drill
        while len(self._drills) > KEPT:
            del self._drills[next(iter(self._drills))]
