"""A ledger on the device: its kernels at full size against the reference, and the order of the streams around it."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from builders.harness import make_group
from kv_canary.fingerprint.gpu import GpuTable
from kv_canary.ledger import TensorLedger
from kv_canary.verifier import Verifier

PAGES, PAGE_BYTES = 4096, 1 << 14

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch"),
]


def columns(ledger: TensorLedger) -> list[list[int]]:
    torch.cuda.synchronize()
    table = ledger._table
    kept = [column for column in table.columns if column is not table._marks]
    return [column.tolist() for column in (*kept, ledger._violations, ledger._reason[:-1], table.claims_not_covered)]


@pytest.mark.parametrize("places", [1, 100, 3000])
def test_the_kernels_leave_what_the_reference_leaves(places: int) -> None:
    random = np.random.default_rng(places)
    reference = TensorLedger("full", PAGES, torch.device("cpu"), kernels=False)
    kernel = TensorLedger("full", PAGES, torch.device("cuda"), kernels=True)
    names = ("allocate", "write", "seal", "claim", "adopt", "release", "reopen", "free", "forget", "move")
    values = {"allocate": 1, "write": 1, "seal": 1, "claim": 2, "adopt": 2, "release": 1, "move": 1}
    for name in random.choice(names, 150).tolist():
        pages = [random.integers(0, PAGES, places) for _ in range(2 if name == "move" else 1)]
        given = [random.integers(0, 3, places) for _ in range(values.get(name, 0))]
        for ledger in (reference, kernel):
            ledger.step()
            getattr(ledger, name)(*(torch.from_numpy(array).to(ledger.device) for array in (*pages, *given)))
        assert columns(kernel) == columns(reference), name
    torch.cuda.synchronize()
    while (left := reference.take_work()) is not None:
        done = kernel.take_work()
        assert done is not None
        assert (done.kind, done.pages.tolist(), done.generations.tolist()) == (
            left.kind,
            left.pages.tolist(),
            left.generations.tolist(),
        )


def test_an_event_waits_for_nothing_and_its_work_comes_when_the_stream_does() -> None:
    ledger, stream = TensorLedger("full", PAGES, torch.device("cuda")), torch.cuda.Stream()
    pages = torch.arange(64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)  # about 200 milliseconds
        began = time.perf_counter()
        ledger.allocate(pages, 7)
        ledger.seal(pages, 9)
        assert time.perf_counter() - began < 0.05
    assert ledger.take_work() is None
    stream.synchronize()
    work = ledger.take_work()
    assert work is not None
    assert (work.pages.tolist(), work.generations.tolist()) == (list(range(64)), [1] * 64)


@pytest.mark.parametrize("legal", [True, False])
def test_a_write_is_never_seen_without_its_raise(legal: bool) -> None:
    """Sweeps over ranges while the engine raises and writes all pages: what was read then is dropped, every time."""
    memory = torch.randint(0, 256, (PAGES, PAGE_BYTES), dtype=torch.uint8, device="cuda")
    group, stream = make_group(memory), torch.cuda.Stream()
    ledger = TensorLedger("full", PAGES, torch.device("cuda"))
    verifier = Verifier(group, ledger, GpuTable(group), watch=lambda: 0, monotonic=time.monotonic)
    every = torch.arange(PAGES, device="cuda")
    found = 0
    for round_ in range(100 if legal else 3):
        with torch.cuda.stream(stream):
            ledger.reopen(every)
            ledger.seal(every, 7)
        stream.synchronize()
        work = ledger.take_work()
        assert work is not None
        verifier.take(work.pages, work.generations)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1 + round_ * 20_000)  # the writes begin somewhere in the middle of a sweep
            if legal:
                ledger.reopen(every)
            for start in range(0, PAGES, 256):
                memory[start : start + 256].add_(1)
        while not stream.query():
            found += len(verifier.verify_range(0, PAGES, "sweep")[0])
        found += len(verifier.verify_range(0, PAGES, "sweep")[0])
    if legal:
        assert found == 0
        assert verifier.counters.superseded > 0  # the sweeps did meet the writes
    else:
        assert found > 0
