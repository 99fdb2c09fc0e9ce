"""A writer on an engine stream recycles pages in GPU memory while the canary verifies them on its own.

The engine has its page numbers on the host, or on the device: then the ledger lives there too, and the device picks the
pages of a sweep itself.
"""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from builders.harness import make_group
from kv_canary import Budget, Settings
from kv_canary.gate import EngineGate
from kv_canary.ledger import HostLedger, Ledger, TensorLedger
from kv_canary.sidecar import Sidecar

DEVICE = os.environ.get("GPU_TEST_DEVICE", "cuda")  # cpu: to try the test itself where there is no GPU
PAGES, PAGE_BYTES = 512, 1 << 16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no CUDA device is visible to torch"),
]


class EventFence:
    """A point on the engine's stream."""

    def __init__(self, stream: Any) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def ready(self) -> bool:
        return self._event.query()


class Engine:
    """Allocates, writes behind a queue of work, seals behind a fence, frees; by the rules."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        self.memory = torch.randint(0, 256, (PAGES, PAGE_BYTES), dtype=torch.uint8, device=DEVICE)
        self.kind, self.gate = kind, EngineGate()
        self.ledger: Ledger = (
            HostLedger("full", PAGES) if kind == "host" else TensorLedger("full", PAGES, torch.device(DEVICE))
        )
        self.stream = torch.cuda.Stream() if DEVICE == "cuda" else None
        self.free, self.held = list(range(PAGES)), []
        self.lock, self.stopping = threading.Lock(), threading.Event()
        self.random, self.steps = random.Random(seed), 0
        self.thread = threading.Thread(target=self._run)

    def resync(self) -> None:
        with self.working():
            self.ledger.reset()
            if self.held:
                self.ledger.adopt(self.at(self.held), fence=self.fence())
            self.ledger.free(self.at(self.free), fence=self.fence())

    def at(self, pages: list[int]) -> Any:
        """Page numbers where this engine has them."""
        return pages if self.kind == "host" else torch.tensor(pages, device=DEVICE)

    def working(self) -> Any:
        return torch.cuda.stream(self.stream) if self.stream is not None else torch.inference_mode()

    def quarantine(self, space: str, page: int) -> str:
        return ""

    def fence(self) -> EventFence | None:
        return EventFence(self.stream) if self.stream is not None else None

    def _run(self) -> None:
        while not self.stopping.is_set():
            with self.lock, self.working():
                self.gate.boundary(self)
                self._step()
                self.steps += 1
            time.sleep(0.0005)

    def _step(self) -> None:
        self.ledger.step()
        if len(self.free) < 64 or (len(self.held) > 128 and self.random.random() < 0.5):
            pages = [self.held.pop(self.random.randrange(len(self.held))) for _ in range(16)]
            self.ledger.release(self.at(pages), "owner")
            self.ledger.free(self.at(pages), fence=self.fence())
            self.free += pages
            return
        pages = [self.free.pop(0) for _ in range(16)]
        self.ledger.allocate(self.at(pages), "owner")
        self.ledger.write(self.at(pages), "owner")
        index = torch.tensor(pages, device=DEVICE)
        self.memory[index] = torch.randint(0, 256, (len(pages), PAGE_BYTES), dtype=torch.uint8, device=DEVICE)
        self.ledger.seal(self.at(pages), 7, fence=self.fence())
        self.held += pages


@pytest.fixture(params=["host", "device"])
def guarded(request: pytest.FixtureRequest):
    engine = Engine(request.param)
    sidecar = Sidecar(Settings(budget=Budget(share=1.0)), engine="test", engine_version="0", seed=0)
    sidecar.start()
    sidecar.attach(engine.gate, [(engine.ledger, [make_group(engine.memory)])])
    by_range = sidecar._canary._guards[0].verifier.by_range
    assert by_range == (request.param == "device" and DEVICE == "cuda")
    engine.thread.start()
    yield engine, sidecar
    engine.stopping.set()
    engine.thread.join()
    sidecar.detach()


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time limit"
        time.sleep(0.005)


def test_a_writer_that_obeys_the_rules_raises_nothing(guarded) -> None:
    _, sidecar = guarded
    wait_for(lambda: sidecar.snapshot().groups[0].counters.verified_pages > 50_000)
    snapshot = sidecar.settle()
    assert snapshot.incidents == ()
    assert snapshot.errors == {}
    assert snapshot.groups[0].counters.sealed_pages > 500
    assert snapshot.drills_total[("fingerprint", "detected")] >= 1


def test_every_illegal_write_is_found(guarded) -> None:
    engine, sidecar = guarded
    wait_for(lambda: sidecar.snapshot().groups[0].counters.verified_pages > 1000)
    hit: dict[int, int] = {}
    for round_ in range(50):
        steps = engine.steps
        wait_for(lambda n=steps: engine.steps > n + 5)
        with engine.lock:
            if engine.stream is not None:
                engine.stream.synchronize()
            sidecar.settle()
            live = engine.ledger.generations(np.arange(PAGES)).tolist()
            page = next(p for p in reversed(engine.held if round_ % 2 else engine.free) if hit.get(p) != live[p])
            hit[page] = live[page]
            engine.memory[page, round_ * 997 % PAGE_BYTES] ^= 1 << (round_ % 8)
            wait_for(lambda n=round_: sidecar.snapshot().incidents_total == n + 1)
        incident = sidecar.snapshot().incidents[-1]
        assert (incident.page, incident.persistence) == (page, "persistent")


@pytest.mark.skipif(DEVICE != "cuda", reason="there are no streams on a CPU")
def test_a_page_written_behind_a_busy_stream_is_sealed_only_when_it_is_written(guarded) -> None:
    """The seal's fence: work queued in front of the write must not make the canary fingerprint the old bytes."""
    engine, sidecar = guarded
    with engine.lock:
        sidecar.settle()
        for _ in range(20):
            page = engine.free.pop(0)
            with engine.working():
                engine.ledger.allocate(engine.at([page]), "slow")
                torch.cuda._sleep(20_000_000)  # about ten milliseconds
                engine.memory[page] = torch.randint(0, 256, (PAGE_BYTES,), dtype=torch.uint8, device=DEVICE)
                # where the page numbers are on the device, the ledger knows how far the stream has come
                engine.ledger.seal(engine.at([page]), 7, fence=engine.fence() if engine.kind == "host" else None)
            engine.held.append(page)
        engine.stream.synchronize()
        verified = sidecar.settle().groups[0].counters.verified_pages
        wait_for(lambda: sidecar.snapshot().groups[0].counters.verified_pages > verified + 2 * PAGES)
    assert sidecar.settle().incidents == ()
