"""The confirm protocol against real threads: a writer that obeys the rules raises nothing, any other is found."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
import torch

from builders.harness import make_group, make_memory
from kv_canary import Settings
from kv_canary.gate import EngineGate
from kv_canary.ledger import HostLedger, TensorLedger
from kv_canary.settings import Budget
from kv_canary.sidecar import Sidecar

PAGES = 64


class Engine:
    """A thread that allocates, writes, seals, shares and frees pages as fast as it can, always by the rules."""

    def __init__(self, ledger: HostLedger | TensorLedger, memory: torch.Tensor, seed: int) -> None:
        self.ledger, self.memory, self.gate = ledger, memory, EngineGate()
        self._random = random.Random(seed)
        self._free = list(range(PAGES))
        self._held: list[int] = []
        self._stop = threading.Event()
        self._pause = threading.Lock()
        self.failure: BaseException | None = None
        self.steps = 0
        self._thread = threading.Thread(target=self._run)

    def resync(self) -> None:
        self.ledger.reset()
        if self._held:
            self.ledger.adopt(self._pages(self._held), 7, "late")
        if self._free:
            self.ledger.free(self._pages(self._free))

    def quarantine(self, space: str, page: int) -> str:
        return "nothing"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def paused(self) -> threading.Lock:
        return self._pause

    def sealed_page(self, *, not_in: set[int] = frozenset()) -> int:
        return self._random.choice([page for page in self._held if page not in not_in])

    def free_page(self, *, not_in: set[int] = frozenset()) -> int:
        return self._random.choice([page for page in self._free if page not in not_in])

    def _pages(self, pages: list[int]):
        return torch.tensor(pages, dtype=torch.int64) if isinstance(self.ledger, TensorLedger) else pages

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                with self._pause:
                    self.gate.boundary(self)
                    self._step()
                    self.steps += 1
                time.sleep(0.0005)  # the forward pass: a real engine lets go of the GIL here
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self.failure = error

    def _step(self) -> None:
        self.ledger.step()
        if len(self._free) < 8 or (len(self._held) > 20 and self._random.random() < 0.5):
            pages = [self._held.pop(self._random.randrange(len(self._held))) for _ in range(min(4, len(self._held)))]
            self.ledger.release(self._pages(pages), "owner")
            self.ledger.free(self._pages(pages))
            self._free += pages
        else:
            pages = [self._free.pop(0) for _ in range(4)]
            self.ledger.allocate(self._pages(pages), "owner")
            self.ledger.write(self._pages(pages), "owner")
            for page in pages:  # in pieces, so that a reader meets half-written pages
                fresh = torch.randint(0, 256, (self.memory.shape[1],), dtype=torch.uint8)
                self.memory[page, : len(fresh) // 2] = fresh[: len(fresh) // 2]
                self.memory[page, len(fresh) // 2 :] = fresh[len(fresh) // 2 :]
            self.ledger.seal(self._pages(pages), 7)
            self._held += pages


def guarded(kind: str, seed: int = 0) -> tuple[Sidecar, Engine]:
    memory = make_memory(PAGES, seed=seed)
    ledger = HostLedger("full", PAGES) if kind == "host" else TensorLedger("full", PAGES, torch.device("cpu"))
    engine = Engine(ledger, memory, seed)
    sidecar = Sidecar(
        Settings(budget=Budget(share=1.0), drill_interval=1.0), engine="test", engine_version="0", seed=seed
    )
    sidecar.start()
    sidecar.attach(engine.gate, [(ledger, [make_group(memory)])])
    engine.start()
    return sidecar, engine


def ledger_generations(engine: Engine) -> list[int]:
    return engine.ledger.generations(np.arange(PAGES)).tolist()


def wait_for(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time limit"
        time.sleep(0.005)


@pytest.mark.parametrize("kind", ["host", "tensor"])
def test_a_writer_that_obeys_the_rules_raises_nothing(kind: str) -> None:
    """Tens of thousands of verifications race with recycling; drills in between prove that the verifier is awake."""
    sidecar, engine = guarded(kind)
    try:
        wait_for(lambda: sidecar.snapshot().groups[0].counters.verified_pages > 20_000, 60)
    finally:
        engine.stop()
        snapshot = sidecar.settle()
        sidecar.stop()
    assert snapshot.incidents == ()
    assert snapshot.errors == {}
    counters = snapshot.groups[0].counters
    assert counters.sealed_pages > 100
    assert snapshot.drills_total[("fingerprint", "detected")] >= 1
    assert snapshot.drills_total[("fingerprint", "missed")] == 0


@pytest.mark.parametrize("kind", ["host", "tensor"])
def test_every_illegal_write_is_found(kind: str) -> None:
    """A writer that skips the ledger: each of its writes, into sealed and free pages, is reported once, on its page."""
    sidecar, engine = guarded(kind, seed=1)
    try:
        wait_for(lambda: sidecar.snapshot().groups[0].counters.verified_pages > 500)
        hit: dict[int, int] = {}
        for round_ in range(40):
            steps = engine.steps
            wait_for(lambda n=steps: engine.steps > n + 20)
            with engine.paused():
                sidecar.settle()  # sealed by now: a write from here on is nobody's right
                live = ledger_generations(engine)
                spoiled = {page for page, generation in hit.items() if live[page] == generation}
                page = (engine.sealed_page if round_ % 2 else engine.free_page)(not_in=spoiled)
                hit[page] = live[page]
                engine.memory[page, round_ * 100] ^= 1 << (round_ % 8)
                expected = "content" if round_ % 2 else "free_page"
                wait_for(lambda n=round_: sidecar.snapshot().incidents_total == n + 1)
                incident = sidecar.snapshot().incidents[-1]
                assert (incident.page, incident.check, incident.persistence) == (page, expected, "persistent")
                assert incident.last_good_at is not None
    finally:
        engine.stop()
        sidecar.stop()


def test_an_active_illegal_writer_is_found_while_it_writes() -> None:
    """A second thread scribbles over sealed pages all the time; the legal engine goes on beside it."""
    sidecar, engine = guarded("host", seed=2)
    stop = threading.Event()
    scribbled: set[int] = set()

    def scribble() -> None:
        source = random.Random(3)
        while not stop.is_set():
            with engine.paused():
                page = engine.sealed_page()
                scribbled.add(page)
                engine.memory[page, source.randrange(8192)] ^= 0xFF
            time.sleep(0.002)

    wait_for(lambda: sidecar.snapshot().groups[0].counters.verified_pages > 500)
    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        wait_for(lambda: sidecar.snapshot().incidents_total >= 20)
    finally:
        stop.set()
        thread.join()
        engine.stop()
        snapshot = sidecar.settle()
        sidecar.stop()
    assert {incident.page for incident in snapshot.incidents} <= scribbled
    assert snapshot.errors == {}


@pytest.mark.parametrize("kind", ["host", "tensor"])
def test_switching_off_and_on_under_load_raises_nothing(kind: str) -> None:
    """Off, not one byte is read and the engine recycles pages unseen; on again, coverage returns without an alarm."""
    from kv_canary.commands import SetEnabled

    sidecar, engine = guarded(kind, seed=4)
    try:
        for _ in range(6):
            before = sidecar.snapshot().groups[0].counters.verified_pages
            wait_for(lambda n=before: sidecar.snapshot().groups[0].counters.verified_pages > n + 300)
            sidecar.submit(SetEnabled(enabled=False)).result(5)
            reads = dict(sidecar.snapshot().groups[0].counters.read_bytes)
            steps = engine.steps
            wait_for(lambda n=steps: engine.steps > n + 50)
            assert dict(sidecar.settle().groups[0].counters.read_bytes) == reads
            assert sidecar.snapshot().groups[0].pages["unknown"] == PAGES
            sidecar.submit(SetEnabled(enabled=True)).result(5)
        wait_for(lambda: sidecar.snapshot().groups[0].pages["unknown"] == 0)
    finally:
        engine.stop()
        snapshot = sidecar.settle()
        sidecar.stop()
    assert snapshot.incidents == ()
    assert snapshot.errors == {}


def test_a_group_switched_off_and_on_raises_nothing_and_covers_again() -> None:
    from kv_canary.commands import SetGroupEnabled

    sidecar, engine = guarded("host", seed=5)
    try:
        wait_for(lambda: sidecar.snapshot().groups[0].counters.verified_pages > 300)
        sidecar.submit(SetGroupEnabled(group="full", enabled=False)).result(5)
        steps = engine.steps
        wait_for(lambda: engine.steps > steps + 100)
        sidecar.submit(SetGroupEnabled(group="full", enabled=True)).result(5)
        with engine.paused():
            sidecar.settle()
            page = engine.sealed_page()
            wait_for(lambda: sidecar.snapshot().groups[0].oldest_verification_age_seconds > 0)
            wait_for(lambda: bool(np.isin(page, sidecar._canary._guards[0].verifier.select(0, PAGES))))
            engine.memory[page, 0] ^= 1
            wait_for(lambda: sidecar.snapshot().incidents_total == 1)
    finally:
        engine.stop()
        sidecar.stop()
    assert sidecar.snapshot().incidents[0].page == page
