"""The reference engine in a thread of its own, under random legal chaos, with a sidecar in another: for a soak."""

from __future__ import annotations

import random
import threading
import time
from contextlib import AbstractContextManager

from kv_canary.faults.engine import ReferenceEngine, Request
from kv_canary.faults.pool import PAGE_BYTES, PAGE_TOKENS
from kv_canary.faults.soaked import Spoiled
from kv_canary.settings import Budget, Settings
from kv_canary.sidecar import Sidecar

PAGES = 1024
REQUESTS = 48
STEP_SECONDS = 0.001  # in which a real engine's forward pass would let go of the GIL


class HarnessRig:
    """Every step a few requests come, grow, fork, are preempted, cancelled, sent to the tier and brought back."""

    name = "harness"

    def __init__(self, seed: int, *, pages: int = PAGES, requests: int = REQUESTS) -> None:
        self.engine = ReferenceEngine(pages, seed=seed)
        self.sidecar = Sidecar(
            Settings(enabled=True, budget=Budget(share=1.0), drill_interval=30.0),
            engine="reference",
            engine_version="1",
            seed=seed,
        )
        self._requests = requests
        self._choose = random.Random(seed)
        self._waiting: list[Request] = []
        self._steps = 0
        self._turn = threading.Lock()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self.sidecar.start()
        self.sidecar.attach(self.engine.gate, [(self.engine.ledger, [self.engine.pool.group()])])
        self._thread = threading.Thread(target=self._run, name="reference-engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                with self._turn:
                    self._chaos()
                    self.engine.step(drafts=self._choose.choice((0, 0, 3)))
                    self._steps += 1
                time.sleep(STEP_SECONDS)
        except BaseException as error:  # noqa: BLE001 - handed to whoever stops it
            self._failure = error

    def _chaos(self) -> None:
        engine, choose = self.engine, self._choose
        while len(engine.active) < self._requests:
            shared = [7] * (PAGE_TOKENS * choose.randrange(1, 5)) if choose.random() < 0.5 else []
            tokens = shared + [choose.randrange(1000) for _ in range(choose.randrange(20, 200))]
            engine.submit(tokens, choose.randrange(2, 100), salt=choose.choice(("", "", "adapter")))
        engine.eager = choose.random() < 0.3
        self._bring_back()
        one = choose.choice(list(engine.active.values()))
        what = choose.random()
        if what < 0.05:
            engine.cancel(one)
        elif what < 0.15:
            engine.preempt(one)
        elif what < 0.25 and one.computed % PAGE_TOKENS and len(engine.active) < 2 * self._requests:
            engine.fork(one)
        elif what < 0.35 and one.sealed and not one.finished:
            engine.offload(one)
            self._waiting.append(one)
        elif what < 0.4:
            engine.evict(choose.randrange(64))

    def _bring_back(self) -> None:
        if len(self._waiting) > 8:
            self.engine.begin_step()
            self.engine.restore(self._waiting.pop(self._choose.randrange(len(self._waiting))))

    def paused(self) -> AbstractContextManager[object]:
        if self._failure is not None:
            raise self._failure
        return self._turn

    def spoil(self, choose: random.Random) -> Spoiled | None:
        """A bit, or some bytes, of a complete or a free page."""
        engine = self.engine
        complete = {page for request in engine.active.values() for page in request.pages[: request.sealed]}
        complete |= set(engine.cached.values())
        free = choose.random() < 0.5
        pages = sorted(engine.free if free else complete - set(engine.free))
        if not pages:
            return None
        page, start = choose.choice(pages), choose.randrange(PAGE_BYTES - 8)
        size, mask = choose.choice((1, 8)), choose.randrange(1, 256)
        engine.pool.bytes[page, start : start + size] ^= mask

        def mend() -> None:
            engine.pool.bytes[page, start : start + size] ^= mask

        return Spoiled(page=page, check="free_page" if free else "content", mend=mend)

    def work_done(self) -> dict[str, int]:
        return {"steps": self._steps, "requests_finished": self.engine.finished}

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
