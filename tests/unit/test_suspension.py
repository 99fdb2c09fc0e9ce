"""An engine takes its memory away and gives it back: nothing of ours touches it in between, and nothing is lost."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from builders.harness import ManualClock, make_group, make_memory
from kv_canary import Budget, Settings
from kv_canary.canary import Canary
from kv_canary.commands import RequestDrill, RequestSweep, SetEnabled
from kv_canary.fingerprint.backends import open_table
from kv_canary.gate import EngineGate
from kv_canary.ledger import HostLedger, Ledger, TensorLedger
from kv_canary.publisher import Subject
from kv_canary.sidecar import Sidecar
from kv_canary.suspension import Suspension

PAGES = 64


class Memory:
    """Whether the engine has taken its memory away, and who touched it meanwhile."""

    def __init__(self) -> None:
        self.taken = False
        self.touched: list[str] = []
        self.reads = 0

    def look(self, who: str) -> None:
        self.reads += 1
        if self.taken:
            self.touched.append(who)


class WatchedTable:
    """A table whose every call looks at the memory before and after."""

    def __init__(self, table: Any, memory: Memory, on_read: Callable[[], None]) -> None:
        self._table, self._memory, self._on_read = table, memory, on_read

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._table, name)
        if not callable(call):
            return call

        def watched(*arguments: Any) -> Any:
            self._memory.look(f"{name} begins")
            if name in ("read", "verify"):
                self._on_read()
            result = call(*arguments)
            self._memory.look(f"{name} ends")
            return result

        return watched


class Desk:
    """A guarded pool; the test plays the engine, and everything that would read its memory is watched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str = "host", **settings: Any) -> None:
        self.watched = Memory()
        self.on_read: Callable[[], None] = lambda: None
        monkeypatch.setattr(
            "kv_canary.sidecar.open_table",
            lambda group, threads: WatchedTable(open_table(group), self.watched, lambda: self.on_read()),
        )
        self.memory = make_memory(PAGES)
        self.ledger: Ledger = (
            HostLedger("full", PAGES) if kind == "host" else TensorLedger("full", PAGES, torch.device("cpu"))
        )
        if kind == "tensor":  # its columns lie on the engine's device too
            to_host = lambda values: self.watched.look("ledger") or (None if values is None else values.cpu().numpy())  # noqa: E731
            monkeypatch.setattr("kv_canary.ledger.tensor._host", to_host)
        self.gate = EngineGate()
        self.sidecar = Sidecar(
            Settings(**{"budget": Budget(share=1.0), "port": 0, **settings}), engine="test", engine_version="0", seed=0
        )
        self.sidecar.start()
        self.sidecar.attach(self.gate, [(self.ledger, [make_group(self.memory)])])
        self.gate.boundary(self)
        self.sidecar.settle()

    def resync(self) -> None:
        self.ledger.reset()
        self.ledger.adopt(self.index(range(PAGES)), 7, 1)

    def index(self, pages: Iterable[int]) -> Any:
        return list(pages) if isinstance(self.ledger, HostLedger) else torch.tensor(list(pages))

    def quarantine(self, space: str, page: int) -> str:
        return ""

    def rewrite(self, pages: list[int]) -> None:
        """What an engine does with pages that it recycles, and then a prefix hit."""
        index = self.index(pages)
        self.ledger.step()
        self.ledger.reopen(index)
        self.memory[pages] += 1
        self.ledger.seal(index, 7)
        self.ledger.claim(index, 7, 2)

    @property
    def group(self) -> Any:
        return self.sidecar.settle().groups[0]


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch):
    desks: list[Desk] = []

    def make(kind: str = "host", **settings: Any) -> Desk:
        desks.append(Desk(monkeypatch, kind, **settings))
        return desks[-1]

    yield make
    for one in desks:
        one.on_read = lambda: None
        one.sidecar.detach()


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "not within the time limit"


# The handshake


@pytest.fixture
def eager_threads():
    """Threads take turns after a few instructions, not after milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_threads")
@pytest.mark.parametrize("kind", ["host", "tensor"])
def test_nothing_is_touched_between_suspend_and_resume(desk, kind: str) -> None:
    """Under seals, claims, sweeps and drills, at 100 moments that nobody chose."""
    one, chance = desk(kind), random.Random(0)
    for _ in range(100):
        one.rewrite(chance.sample(range(PAGES), 8))
        one.gate.boundary(one)
        assert one.sidecar.suspend("capture")
        one.watched.taken = True
        one.sidecar.submit(RequestDrill(kind="fingerprint"))
        one.sidecar.submit(RequestSweep())
        one.rewrite(chance.sample(range(PAGES), 8))
        one.sidecar.settle()
        one.watched.taken = False
        one.sidecar.resume("capture")
    until = time.monotonic() + 60  # a busy machine may not have come to a launch in between
    while not one.group.counters.verified_pages and time.monotonic() < until:
        one.sidecar.settle()
    assert one.watched.touched == []
    assert one.group.counters.verified_pages > 0
    assert one.group.counters.mismatches == {}


@pytest.mark.usefixtures("eager_threads")
def test_many_threads_that_suspend_at_once_never_meet_a_reader() -> None:
    reading, met = threading.Event(), []
    stop = threading.Event()
    suspension = Suspension(monotonic=ManualClock().monotonic, synchronize=lambda: None)

    def reader() -> None:
        while not stop.is_set():
            with suspension.reading() as allowed:
                if allowed:
                    reading.set()
                    np.zeros(1000).sum()
                    reading.clear()

    def engine(name: str) -> None:
        for _ in range(500):
            if not suspension.suspend(name, 30):
                met.append("timeout")
            if reading.is_set():
                met.append(name)
            suspension.resume(name)

    threads = [threading.Thread(target=reader), *(threading.Thread(target=engine, args=(str(i),)) for i in range(3))]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    stop.set()
    threads[0].join()
    assert met == []


def test_reading_goes_on_when_the_last_reason_is_taken_back() -> None:
    suspension = Suspension(monotonic=ManualClock().monotonic, synchronize=lambda: None)
    suspension.suspend("capture", 0)
    suspension.suspend("sleep", 0)
    suspension.suspend("sleep", 0)
    seen = []
    for reason in ("capture", "never suspended", "sleep"):
        suspension.resume(reason)
        with suspension.reading() as allowed:
            seen.append(allowed)
    assert seen == [False, False, True]


def test_suspend_waits_for_the_reading_under_way_and_for_the_device() -> None:
    done: list[str] = []
    suspension = Suspension(monotonic=ManualClock().monotonic, synchronize=lambda: done.append("synchronized"))
    with suspension.reading():
        waiting = threading.Thread(target=lambda: done.append(str(suspension.suspend("capture", 30))))
        waiting.start()
        wait_until(lambda: suspension.reasons)
        assert not suspension.suspend("capture", 0)
        done.append("read")
    waiting.join()
    assert done == ["read", "synchronized", "True"]


def test_the_device_is_waited_for_when_a_reading_fails_too() -> None:
    done: list[str] = []
    suspension = Suspension(monotonic=ManualClock().monotonic, synchronize=lambda: done.append("synchronized"))

    def fail() -> None:
        with suspension.reading():
            suspension.suspend("capture", 0)
            raise OSError("made to fail")

    with pytest.raises(OSError, match="made to fail"):
        fail()
    assert done == ["synchronized"]
    assert suspension.suspend("capture", 0)


def test_a_reading_that_nobody_waits_for_waits_for_no_device() -> None:
    done: list[str] = []
    with Suspension(monotonic=ManualClock().monotonic, synchronize=lambda: done.append("synchronized")).reading():
        pass
    assert done == []


# The canary meanwhile


def test_work_that_came_meanwhile_is_done_afterwards(desk) -> None:
    one = desk()
    sealed = one.group.counters.sealed_pages
    assert one.sidecar.suspend("capture")
    one.rewrite([1, 2, 3])
    assert one.group.counters.sealed_pages == sealed
    one.sidecar.resume("capture")
    assert one.group.counters.sealed_pages == sealed + 3


def test_a_backlog_that_is_cut_in_two_is_finished_afterwards(desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine waits for one launch, not for the backlog; the rest is not lost."""
    one = desk(budget=Budget(bytes_per_second=1.0))
    monkeypatch.setattr(type(one.sidecar._canary._scrubber), "launch_bytes", 1)
    sealed, launches, engine = one.group.counters.sealed_pages, [], []

    def suspend_in_the_third() -> None:
        launches.append(None)
        if len(launches) == 3:
            engine.append(threading.Thread(target=lambda: engine.append(one.sidecar.suspend("capture", 30))))
            engine[0].start()
            wait_until(lambda: one.sidecar._canary.suspension.reasons)

    one.on_read = suspend_in_the_third
    one.rewrite(list(range(20)))
    one.sidecar.settle()
    engine[0].join()
    assert engine[1] is True
    assert len(launches) == 3
    one.sidecar.resume("capture")
    assert one.group.counters.sealed_pages == sealed + 20


def test_the_status_says_who_asked_and_the_thread_ticks_on(desk) -> None:
    one = desk()
    one.sidecar.suspend("sleep")
    one.sidecar.suspend("capture")
    first = one.sidecar.settle()
    assert (first.state, first.reason) == ("running", "suspended: capture, sleep")
    assert first.warnings[0] == "nothing is read, the engine asked for it: capture, sleep"
    assert one.sidecar.settle().tick_at > first.tick_at
    one.sidecar.resume("sleep")
    one.sidecar.resume("capture")
    assert one.sidecar.settle().reason is None


def test_time_in_which_nothing_could_be_read_does_not_count_against_the_deadline() -> None:
    clock = ManualClock()
    settings = Settings(budget=Budget(share=1.0), sweep_deadline=10.0)
    canary = Canary(settings, Subject(engine="test", engine_version="0"), clock, seed=0)
    group, ledger, gate = make_group(make_memory(4)), HostLedger("full", 4), EngineGate()

    class Port:
        def resync(self) -> None:
            ledger.reset()
            ledger.adopt(range(4), 7, "owner")

        def quarantine(self, space: str, page: int) -> str:
            return ""

    canary.take_over(gate, [(ledger, [(group, open_table(group), None)])], 1e9, ())
    gate.boundary(Port())
    canary.settle()
    clock.now += 3
    canary.suspension.suspend("sleep", 0)
    clock.now += 3600
    canary.tick()
    assert canary.snapshot.groups[0].sweep.deadline_met
    canary.suspension.resume("sleep")
    clock.now += 4
    canary.settle()
    assert canary.snapshot.groups[0].oldest_verification_age_seconds == 7
    assert canary.snapshot.groups[0].sweep.deadline_met
    clock.now += 4
    assert not canary.settle().groups[0].sweep.deadline_met


# When it cannot be had


def test_a_stuck_canary_is_given_up_and_reads_nothing_until_a_person_switches_it_on(desk, caplog) -> None:
    one, release = desk(), threading.Event()
    stuck = threading.Event()

    def hang() -> None:
        stuck.set()
        release.wait(30)

    one.on_read = hang
    assert stuck.wait(30)
    assert not one.sidecar.suspend("sleep", 0.01)
    assert not one.sidecar.suspend("sleep", 0.01)
    one.on_read = lambda: None
    release.set()
    assert one.sidecar.suspend("sleep", 30)  # it has ended
    one.sidecar.resume("sleep")
    wait_until(lambda: not one.group.enabled)
    reason = "hook suspend failed: TimeoutError: a reading did not end within 0.01 s; asked for by sleep"
    assert one.group.disabled_reason == reason
    assert one.sidecar.snapshot().errors == {"hook": 1}
    assert sum("hook suspend failed" in record.getMessage() for record in caplog.records) == 1
    reads = one.watched.reads
    one.rewrite([1])
    one.sidecar.settle()
    one.gate.boundary(one)
    one.sidecar.settle()
    assert one.watched.reads == reads
    one.sidecar.submit(SetEnabled(enabled=True)).result(5)
    one.gate.boundary(one)
    one.sidecar.settle()
    assert one.watched.reads > reads


def test_a_canary_that_has_ended_has_nothing_in_flight(desk) -> None:
    one = desk()
    one.sidecar.detach()
    assert one.sidecar.suspend("sleep", 0)
    one.sidecar.resume("sleep")


def test_a_sidecar_that_never_started_can_be_asked() -> None:
    sidecar = Sidecar(Settings(port=0), engine="test", engine_version="0")
    assert sidecar.suspend("capture", 0)
    sidecar.resume("capture")


# Content that is gone


def test_memory_that_lost_its_content_is_no_mismatch(desk) -> None:
    """Sleep, wake, and the engine's tables told anew."""
    one = desk()
    one.group  # noqa: B018 - settled
    assert one.sidecar.suspend("sleep")
    one.memory[:] = 0
    one.gate.forget()
    assert one.sidecar.settle().groups[0].pages["unknown"] == PAGES
    one.sidecar.resume("sleep")
    one.sidecar.settle()
    one.gate.boundary(one)
    assert one.group.pages["sealed"] == PAGES
    assert one.sidecar.snapshot().incidents == ()
    one.memory[5, 3] ^= 1
    one.sidecar.submit(RequestSweep()).result(5)
    wait_until(lambda: one.sidecar.settle().incidents)
    assert one.sidecar.snapshot().incidents[0].page == 5


def test_a_gate_that_is_closed_stays_closed_when_content_is_gone() -> None:
    gate = EngineGate()
    gate.forget()
    assert not gate.opening
    gate.open()
    gate.fail("seal", OSError("made to fail"))
    gate.forget()
    gate.close()
    gate.forget()
    assert not gate.opening
