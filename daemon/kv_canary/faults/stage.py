"""A stage: the reference engine under a canary that works in the same thread: a scenario has one order of steps.

The clock is the machine's, so that what a detection took is a time that somebody would have waited.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kv_canary.canary import Canary
from kv_canary.clock import SystemClock
from kv_canary.commands import RequestDrill
from kv_canary.errors import KVCanaryError
from kv_canary.faults.engine import ReferenceEngine, Request
from kv_canary.faults.pool import PAGE_TOKENS
from kv_canary.fingerprint.backends import open_buffer_table, open_table
from kv_canary.publisher import Subject
from kv_canary.settings import Settings
from kv_canary.snapshot import Incident

WARM_STEPS = 12
READ_BANDWIDTH = 5e9  # bytes a second: a slow machine's, so that the default budget is 50 MB/s on every one
PATIENCE_SECONDS = 5.0


class NotProducedError(KVCanaryError):
    """A scenario did not come about: what follows from it would mean nothing."""


def must(condition: bool, what: str) -> None:
    """Raises `NotProducedError` unless what the scenario is about really happened."""
    if not condition:
        raise NotProducedError(f"not produced: {what}")


class Stage:
    """An engine, its canary, and a prompt book. `warm` puts requests of every age into the pool."""

    def __init__(self, seed: int, *, pages: int = 48) -> None:
        self.engine = ReferenceEngine(pages, seed=seed)
        self.random = self.engine.random
        group = self.engine.pool.group()
        self.canary = Canary(
            Settings(enabled=True, drill_interval=3600.0),
            Subject(engine="reference", engine_version="1"),
            SystemClock(),
            seed=seed,
        )
        tables = [(group, open_table(group), open_buffer_table(group))]
        self.canary.take_over(self.engine.gate, [(self.engine.ledger, tables)], READ_BANDWIDTH, ())

    def prompt(self, tokens: int = 3 * PAGE_TOKENS + 5) -> list[int]:
        return [self.random.randrange(1000) for _ in range(tokens)]

    def warm(self) -> None:
        for index in range(4):
            self.engine.submit(self.prompt(), 4 + 8 * index)
        self.steps(WARM_STEPS)
        self.settle()

    def steps(self, count: int, *, drafts: int = 0) -> None:
        for _ in range(count):
            self.engine.step(drafts=drafts)
            self.canary.tick()

    def serve(self, request: Request) -> None:
        """Until it is finished."""
        while request.id in self.engine.active:
            self.steps(1)

    def settle(self) -> None:
        """Every event applied, every fingerprint taken; then one more look at everything, by the clock."""
        self.canary.settle()

    def until(self, condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(self.canary.tick())
        return True

    def swept(self) -> bool:
        """Goes on until every group was swept once more, whole, from its beginning."""
        sweeps = self.canary._guards[0].verifier.counters.sweeps
        wanted = sum(sweeps.values()) + 2
        return self.until(lambda: sum(sweeps.values()) >= wanted)

    @property
    def incidents(self) -> list[Incident]:
        self.canary.settle()
        return [incident for incident in self.canary.snapshot.incidents if incident.source == "real"]

    @property
    def verified_pages(self) -> int:
        return self.canary.snapshot.groups[0].counters.verified_pages

    def is_awake(self) -> bool:
        """A flipped bit of a stored fingerprint is found: what stayed silent could have spoken."""
        drill = self.canary.obey(RequestDrill(kind="fingerprint"))

        def result() -> str:
            return next(one.result for one in self.canary.snapshot.drills if one.id == drill.id)

        self.until(lambda: result() != "running")
        return result() == "detected"
