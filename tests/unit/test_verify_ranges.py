"""Ranges whose pages the device picks itself: what is read, what is dropped, and what a sweep makes of it.

Ledger and table live on one device: a GPU where there is one, else the CPU under Triton's interpreter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.harness import ManualClock, make_group, make_memory
from builders.ledgers import DEVICE
from builders.pools import Layout, Part, make_pool
from kv_canary import Budget, Settings
from kv_canary.findings import Finding
from kv_canary.fingerprint import gpu, spec
from kv_canary.fingerprint.gpu import GpuTable
from kv_canary.fingerprint.table import PageRanges
from kv_canary.fingerprint.tensor import TensorTable
from kv_canary.gate import EngineGate
from kv_canary.guard import GroupGuard
from kv_canary.ledger import FREE, LOADING, OPEN, SEALED, UNKNOWN, HostLedger, TensorLedger
from kv_canary.ledger.columns import PageColumns
from kv_canary.scrubber import Scrubber
from kv_canary.sidecar import Sidecar
from kv_canary.verifier import Verifier

PAGES = 13  # the last tile is not full


class Guarded:
    """A pool whose ledger and fingerprints live beside it; driven by the test itself."""

    def __init__(self, pages: int = PAGES, first_page: int = 0) -> None:
        self.memory = make_memory(pages, page_bytes=256).to(DEVICE)
        self.group = make_group(self.memory, first_page=first_page)
        self.ledger = TensorLedger("full", pages, DEVICE, kernels=False)
        self.clock, self.gate = ManualClock(), EngineGate()
        self.gate.recording = True
        self.verifier = Verifier(
            self.group, self.ledger, GpuTable(self.group), watch=self.gate.watch, monotonic=self.clock.monotonic
        )
        assert self.verifier.by_range

    def sealed(self, *pages: int) -> None:
        self.ledger.allocate(list(pages), "a")
        self.ledger.seal(list(pages), 7)
        self.apply()

    def apply(self) -> None:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        while (work := self.ledger.take_work()) is not None:
            if work.kind == "move":
                self.verifier.move(work)
            else:
                self.verifier.take(*self.verifier.missing(work.pages, work.generations))

    def flip(self, page: int, byte: int = 3) -> None:
        self.memory[page, byte] ^= 1

    def sweep(self, start: int = 0, stop: int | None = None) -> list[Finding]:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        findings, self.read_pages = self.verifier.verify_range(start, stop or len(self.memory), "sweep")
        return findings


def after_the_reading(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Runs `action` once, when the next range has been read and is not settled yet."""
    kernel, actions = gpu.settle_kernel, [action]

    class Settle:
        def __getitem__(self, grid: Any) -> Any:
            if actions:
                if DEVICE.type == "cuda":
                    torch.cuda.synchronize()
                actions.pop()()
                if DEVICE.type == "cuda":
                    torch.cuda.synchronize()
            return kernel[grid]

    monkeypatch.setattr(gpu, "settle_kernel", Settle())


# The kernel


LAYOUTS = {
    "contiguous": Layout(parts=(Part(tokens=3, heads=2, piece=16),) * 2, pages=PAGES, minimum_stripe_bytes=1),
    "by word": Layout(parts=(Part(tokens=3, heads=2, piece=16, heads_first=True),), pages=PAGES),
    "by byte": Layout(parts=(Part(tokens=2, heads=3, piece=13, spacing=3),), pages=PAGES, lead=5),
}


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_exactly_the_pages_whose_fingerprint_holds_are_read(name: str, data: st.DataObject) -> None:
    pool = make_pool(LAYOUTS[name], seed=1, device=DEVICE.type)
    table, every = GpuTable(pool.group), np.arange(PAGES)
    table.store(every, table.read(every))
    column = lambda values: st.lists(st.sampled_from(values), min_size=PAGES, max_size=PAGES)  # noqa: E731
    states = data.draw(column([SEALED, FREE, SEALED, OPEN, UNKNOWN, LOADING]))
    live = data.draw(column([0, 3, 3, 4]))
    taken = data.draw(column([3, 3, 0, -1]))
    wrong = data.draw(st.sets(st.integers(0, PAGES - 1), max_size=5))
    first = data.draw(st.integers(0, PAGES))
    stop = data.draw(st.integers(first, PAGES))
    for page in wrong:
        pool.memory[pool.positions(0, page)[0]] ^= 1
    pool.sync()
    columns = PageColumns(
        state=torch.tensor(states, dtype=torch.uint8, device=DEVICE), generation=torch.tensor(live, device=DEVICE)
    )
    ranges = table.ranges(columns)
    assert ranges is not None
    ranges.keep(every, np.array(taken))
    outcome = ranges.verify(first, stop)
    picked = [states[page] in (SEALED, FREE) and live[page] == taken[page] for page in range(first, stop)]
    assert (outcome.read_pages, outcome.stands.tolist(), outcome.complete) == (sum(picked), picked, True)
    differences = outcome.differences
    found = zip(differences.rows.tolist(), differences.stripes.tolist(), differences.found.tolist(), strict=True)
    assert sorted(found) == [
        (page - first, stripe, spec.fingerprint_bytes(pool.logical(page)[stripe]))
        for page in range(first, stop)
        if picked[page - first] and page in wrong
        for stripe, parts in pool.stripe_parts()
        if 0 in parts
    ]


def opened(pages: int = PAGES, **columns: torch.Tensor) -> tuple[torch.Tensor, GpuTable, PageRanges]:
    """All pages sealed, and expected to hold nothing that they hold."""
    memory = make_memory(pages, page_bytes=256).to(DEVICE)
    table = GpuTable(make_group(memory))
    state = columns.get("state", torch.full((pages,), SEALED, dtype=torch.uint8, device=DEVICE))
    ranges = table.ranges(PageColumns(state=state, generation=torch.zeros(pages, dtype=torch.int64, device=DEVICE)))
    assert ranges is not None
    ranges.keep(np.arange(pages), np.zeros(pages, np.int64))
    return memory, table, ranges


def test_a_range_longer_than_a_launch_is_read_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "RANGE_ROWS", 5)
    _, _, ranges = opened()
    outcome = ranges.verify(1, PAGES)
    assert (outcome.read_pages, outcome.stands.tolist()) == (PAGES - 1, [True] * (PAGES - 1))
    where = zip(outcome.differences.rows.tolist(), outcome.differences.stripes.tolist(), strict=True)
    assert sorted(where) == [(row, stripe) for row in range(PAGES - 1) for stripe in (0, 1)]


def test_nothing_is_read_once_the_baseline_is_forgotten() -> None:
    _, _, ranges = opened()
    ranges.forget()
    outcome = ranges.verify(0, PAGES)
    assert (outcome.read_pages, outcome.stands.any(), len(outcome.differences.rows)) == (0, False, 0)


def test_more_differences_than_fit_are_said_to_be_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, ranges = opened()
    monkeypatch.setattr(gpu, "MAXIMUM_DIFFERENCES", 3)
    outcome = ranges.verify(0, PAGES)
    assert (outcome.read_pages, len(outcome.differences.rows), outcome.complete) == (PAGES, 3, False)


def test_there_are_ranges_only_where_ledger_and_fingerprints_share_a_device(caplog: pytest.LogCaptureFixture) -> None:
    memory = make_memory(8, page_bytes=256).to(DEVICE)
    group = make_group(memory)
    table = GpuTable(group)
    elsewhere = torch.zeros(8, dtype=torch.int64, device="meta")
    assert table.ranges(HostLedger("full", 8).columns) is None
    assert table.ranges(PageColumns(state=elsewhere, generation=elsewhere)) is None
    assert TensorTable(group).ranges(TensorLedger("full", 8, DEVICE).columns) is None
    assert table.ranges(TensorLedger("full", 8, DEVICE).columns) is not None
    assert caplog.text == ""  # it was not tried


def test_a_kernel_that_does_not_compile_leaves_the_way_by_lists(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def __getitem__(self, grid: Any) -> Any:
            raise RuntimeError("no such target")

    table = GpuTable(make_group(make_memory(8, page_bytes=256).to(DEVICE)))
    monkeypatch.setattr(gpu, "settle_kernel", Broken())
    assert table.ranges(TensorLedger("full", 8, DEVICE).columns) is None
    assert "no such target" in caplog.text


# The verifier


def test_a_flipped_bit_is_found_and_confirmed() -> None:
    guarded = Guarded()
    guarded.sealed(*range(PAGES))
    assert guarded.sweep() == []
    assert (guarded.read_pages, guarded.verifier.counters.verified_pages) == (PAGES, PAGES)
    guarded.flip(11, 300)
    (finding,) = guarded.sweep()
    assert (finding.page, finding.stripes, finding.persistence, finding.free) == (11, (1,), "persistent", False)
    assert finding.last_good == guarded.clock.now


def test_a_free_page_that_changes_is_found_as_free() -> None:
    guarded = Guarded()
    guarded.sealed(5)
    guarded.ledger.release([5], "a")
    guarded.ledger.free([5])
    guarded.apply()
    guarded.flip(5)
    (finding,) = guarded.sweep()
    assert (finding.page, finding.free) == (5, True)


def test_open_unknown_and_null_pages_are_not_looked_at() -> None:
    guarded = Guarded(first_page=1)
    guarded.sealed(0, 2)
    guarded.ledger.allocate([3], "a")
    for page in (0, 3, 4):
        guarded.flip(page)
    assert guarded.sweep() == []
    assert guarded.verifier.counters.read_bytes["sweep"] == guarded.group.bytes_per_page


def test_a_page_that_was_reallocated_is_not_read() -> None:
    guarded = Guarded()
    guarded.sealed(8)
    guarded.ledger.allocate([8], "b")
    guarded.flip(8)
    assert (guarded.sweep(), guarded.read_pages) == ([], 0)


@pytest.mark.parametrize("legal", [True, False])
def test_a_page_that_is_reallocated_while_it_is_read_is_superseded(
    monkeypatch: pytest.MonkeyPatch, legal: bool
) -> None:
    guarded = Guarded()
    guarded.sealed(7, 8)
    guarded.flip(8)
    after_the_reading(monkeypatch, lambda: guarded.ledger.allocate([8], "b") if legal else None)
    findings = guarded.sweep()
    counters = guarded.verifier.counters
    assert guarded.read_pages == 2
    assert ([finding.page for finding in findings], counters.superseded, counters.verified_pages) == (
        ([], 1, 1) if legal else ([8], 0, 2)
    )


def test_a_page_that_is_reallocated_before_the_second_reading_is_superseded() -> None:
    guarded = Guarded()
    guarded.sealed(8)
    guarded.flip(8)
    read = guarded.verifier.table.read
    guarded.verifier.table.read = lambda pages: (read(pages), guarded.ledger.allocate([8], "b"))[0]  # type: ignore
    assert guarded.sweep() == []
    assert guarded.verifier.counters.superseded == 1


def test_a_right_second_reading_is_transient(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = Guarded()
    guarded.sealed(8)
    guarded.flip(8)
    after_the_reading(monkeypatch, lambda: guarded.flip(8))
    assert [finding.persistence for finding in guarded.sweep()] == ["transient"]


def test_a_reading_across_a_closed_gate_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = Guarded()
    guarded.sealed(7, 8)
    guarded.flip(8)
    after_the_reading(monkeypatch, guarded.gate.close)
    assert guarded.sweep() == []
    assert guarded.verifier.counters.superseded == 2
    assert guarded.sweep() == []
    assert guarded.read_pages == 0  # a closed gate: nothing is read


def test_after_forget_nothing_is_read_until_it_is_sealed_anew() -> None:
    guarded = Guarded()
    guarded.sealed(1, 2)
    guarded.verifier.forget()
    assert (guarded.sweep(), guarded.read_pages) == ([], 0)
    assert guarded.verifier.seal_missing(0, PAGES) == 2 * guarded.group.bytes_per_page
    assert (guarded.sweep(), guarded.read_pages) == ([], 2)


def test_a_copy_is_held_against_its_source() -> None:
    guarded = Guarded()
    guarded.sealed(1)
    guarded.ledger.allocate([2], "b")
    guarded.memory[2] = guarded.memory[1]
    guarded.ledger.move([1], [2], "b")
    guarded.flip(2)
    guarded.apply()
    assert [finding.page for finding in guarded.sweep()] == [2]


def test_only_pages_that_were_read_and_right_are_seen_good(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = Guarded()
    guarded.sealed(1, 2, 3, 4)
    guarded.clock.now += 10
    guarded.flip(2)
    after_the_reading(monkeypatch, lambda: guarded.ledger.allocate([3], "b"))
    guarded.sweep(0, 4)
    guarded.clock.now += 1
    assert guarded.verifier.is_older(np.array([1, 2, 3, 4]), 5).tolist() == [False, True, True, True]
    assert guarded.verifier.oldest_age(0, 2) == 1
    assert guarded.verifier.oldest_age(0, PAGES) == 11


def test_when_differences_were_left_out_no_page_is_seen_good(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = Guarded()
    guarded.sealed(1, 2, 3, 4)
    for page in (1, 2, 3):
        guarded.flip(page)
    guarded.clock.now += 10
    monkeypatch.setattr(gpu, "MAXIMUM_DIFFERENCES", 1)
    assert len(guarded.sweep()) == 1
    assert guarded.verifier.is_older(np.array([1, 2, 3, 4]), 5).all()


# The whole way, on threads


def test_a_canary_beside_a_device_ledger_finds_an_illegal_write_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = Guarded()
    # Triton's interpreter serves one thread at a time: here that is the canary's
    ledger, gate = TensorLedger("full", PAGES, DEVICE, kernels=DEVICE.type == "cuda"), EngineGate()

    class Engine:
        def resync(self) -> None:
            ledger.reset()
            ledger.free(torch.arange(PAGES, device=DEVICE))

        def quarantine(self, space: str, page: int) -> str:
            return ""

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "not within the time limit"
            time.sleep(0.005)

    monkeypatch.setattr("kv_canary.sidecar.open_table", lambda group, **_: GpuTable(group))
    sidecar = Sidecar(Settings(budget=Budget(share=1.0)), engine="test", engine_version="0", seed=0)
    sidecar.start()
    try:
        sidecar.attach(gate, [(ledger, [guarded.group])])
        engine = Engine()
        for number in range(40):
            gate.boundary(engine)
            ledger.step()
            pages = torch.tensor([number % PAGES, (number + 5) % PAGES], device=DEVICE)
            ledger.allocate(pages, number)
            guarded.memory[pages] = torch.full((2, guarded.memory.shape[1]), number, dtype=torch.uint8, device=DEVICE)
            ledger.seal(pages, number)
            ledger.release(pages, number)
            ledger.free(pages)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        counters = sidecar.settle().groups[0].counters
        wait_for(lambda: sidecar.snapshot().groups[0].counters.verified_pages > counters.verified_pages + PAGES)
        assert sidecar.snapshot().incidents == ()
        guarded.flip(9)
        wait_for(lambda: bool(sidecar.snapshot().incidents))
        (incident,) = sidecar.snapshot().incidents
        assert (incident.page, incident.persistence) == (9, "persistent")
        assert sidecar.snapshot().errors == {}
    finally:
        sidecar.detach()


# The scrubber


def scrubber(guarded: Guarded, bandwidth: float) -> tuple[Scrubber, GroupGuard]:
    guard = GroupGuard(verifier=guarded.verifier, gate=guarded.gate)
    return (
        Scrubber(
            [guard],
            budget=Budget(share=1.0),
            read_bandwidth=bandwidth,
            monotonic=guarded.clock.monotonic,
            time=guarded.clock.time,
        ),
        guard,
    )


def test_a_sweep_picks_its_pages_without_asking_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of pages would need the generations on the host, and waiting for them."""
    guarded = Guarded()
    guarded.sealed(*range(PAGES))

    def asked(*_: object) -> None:
        raise AssertionError("the device was asked")

    for name in ("generations", "generations_between", "states"):
        monkeypatch.setattr(guarded.ledger, name, asked)
    sweep, guard = scrubber(guarded, bandwidth=1e9)
    assert sweep.advance(lambda *_: True) == PAGES * guarded.group.bytes_per_page
    assert guard.last_finished_at is not None


def test_a_launch_never_reads_more_than_its_share_and_a_pass_sees_every_page() -> None:
    guarded = Guarded()
    guarded.sealed(*range(0, PAGES, 2))
    guarded.flip(12)
    launch = 4 * guarded.group.bytes_per_page
    seconds = 0.002 if DEVICE.type == "cpu" else 0.001
    sweep, guard = scrubber(guarded, bandwidth=launch / seconds)
    found: list[int] = []
    request = sweep.request("sweep-1", [guard])
    for _ in range(4):
        guarded.clock.now += 1
        assert sweep.advance(lambda _, finding: found.append(finding.page) is None) <= launch
    request = sweep.requests[request.id]
    assert (found, request.state, request.mismatches) == ([12], "finished", 1)
    assert (request.scanned_pages, request.verified_pages) == (PAGES, 7)
