"""A real sidecar over a real pool, under traffic that obeys the rules, for tests that attack it.

The engine here is a thread that allocates, writes, seals, shares and frees pages all the time. Whoever changes a byte
behind its back does it in `between_steps`, when no write is under way.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from builders.harness import make_group, make_memory
from kv_canary import Budget, Settings
from kv_canary.clock import Clock
from kv_canary.gate import EngineGate
from kv_canary.ledger import HostLedger
from kv_canary.sidecar import Sidecar

PAGES = 64
STEP_SECONDS = 0.0005  # the forward pass: a real engine lets go of the GIL here


class Engine:
    """Pages in `held` are sealed, those in `free` are free; both change only between steps."""

    def __init__(self, *, pages: int = PAGES, seed: int = 0) -> None:
        self.memory = make_memory(pages, seed=seed)
        self.ledger, self.gate = HostLedger("full", pages), EngineGate()
        self.group = make_group(self.memory)
        self.free, self.held = list(range(pages)), list[int]()
        self.quarantined: list[int] = []
        self.steps = 0
        self.step_seconds: list[float] = []
        self.failure: BaseException | None = None
        self._random = random.Random(seed)
        self._between = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine")

    def resync(self) -> None:
        self.ledger.reset()
        if self.held:
            self.ledger.adopt(self.held, 7, "late")
        if self.free:
            self.ledger.free(self.free)

    def quarantine(self, space: str, page: int) -> str:
        self.quarantined.append(page)
        return "taken out"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self.failure is not None:
            raise self.failure

    def between_steps(self) -> threading.Lock:
        return self._between

    def boundary(self) -> None:
        """What the engine's thread does between two steps; for a test that plays that thread."""
        self.gate.boundary(self)
        self.steps += 1

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                with self._between:
                    began = time.perf_counter()
                    self.boundary()
                    self._step()
                time.sleep(STEP_SECONDS)
                self.step_seconds.append(time.perf_counter() - began)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self.failure = error

    def _step(self) -> None:
        recording = self.gate.recording
        if recording:
            self.ledger.step()
        if len(self.free) < 8 or (len(self.held) > 20 and self._random.random() < 0.5):
            pages = [self.held.pop(self._random.randrange(len(self.held))) for _ in range(min(4, len(self.held)))]
            if recording:
                self.ledger.release(pages, "owner")
                self.ledger.free(pages)
            self.free += pages
        else:
            pages = [self.free.pop(0) for _ in range(4)]
            if recording:
                self.ledger.allocate(pages, "owner")
                self.ledger.write(pages, "owner")
            for page in pages:  # in pieces, so that a reader meets half-written pages
                fresh = torch.randint(0, 256, (self.memory.shape[1],), dtype=torch.uint8)
                self.memory[page, : len(fresh) // 2] = fresh[: len(fresh) // 2]
                self.memory[page, len(fresh) // 2 :] = fresh[len(fresh) // 2 :]
            if recording:
                self.ledger.seal(pages, 7)
            self.held += pages


def attack_settings(**overrides: Any) -> Settings:
    return Settings(**{"budget": Budget(share=1.0), "port": 0, "allow_content_drills": True, **overrides})


@contextmanager
def guarded_pool(
    *, traffic: bool = True, served: bool = False, seed: int = 0, clock: Clock | None = None, **settings: Any
) -> Iterator[tuple[Sidecar, Engine]]:
    """Attached and, with `traffic`, running; both are ended afterwards, and the engine must not have failed."""
    engine = Engine(seed=seed)
    sidecar = Sidecar(attack_settings(**settings), engine="test", engine_version="0", seed=seed, clock=clock)
    sidecar.start()
    if served:
        sidecar.serve()
    sidecar.attach(engine.gate, [(engine.ledger, [engine.group])])
    if traffic:
        engine.start()
    else:
        engine.boundary()
    try:
        yield sidecar, engine
    finally:
        try:
            engine.stop()
        finally:
            sidecar.detach()


def wait_for(condition: Callable[[], Any], seconds: float = 30.0, what: str = "it happens") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.002)
