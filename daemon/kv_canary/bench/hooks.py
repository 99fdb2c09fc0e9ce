"""What hooks cost: microseconds a step that the engine's thread spends in the ledger, while a real canary drains it.

Measured is what the daemon does for an event (recording it, raising generations, hashing a completed page's tokens). An
adapter's own translation comes on top; the engine part of the bench measures that.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from kv_canary.bench.timing import median, percentile
from kv_canary.bench.traffic import PAGE_TOKENS, SyntheticEngine
from kv_canary.gate import EngineGate
from kv_canary.geometry import CanaryGroup, build_group, contiguous_buffer
from kv_canary.ledger import HostLedger, Ledger, TensorLedger
from kv_canary.settings import Settings
from kv_canary.sidecar import Sidecar

SEQUENCES = (1, 64, 256)
STEPS = 1000
FORWARD_SECONDS = 0.002
PAGES = 16_384
_WARM_STEPS = 64
_LAYERS = 2
_ROW_BYTES = 32

LedgerKind = Literal["host", "tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HookRow:
    """Microseconds of engine-thread time a step."""

    ledger: LedgerKind
    device: str
    sequences: int
    pages: int
    steps: int
    median_us: float
    p99_us: float
    maximum_us: float
    sealed_pages: int
    mismatches: int

    def as_document(self) -> dict[str, Any]:
        return asdict(self)


def measure_hooks(
    kind: LedgerKind,
    *,
    sequences: int,
    device: torch.device,
    pages: int = PAGES,
    steps: int = STEPS,
    each_hundred: Callable[[], None] = lambda: None,
) -> HookRow:
    """Runs a synthetic engine under a real sidecar with the default budget. Sets torch's number of threads to 1."""
    torch.set_num_threads(1)
    group = small_pool(pages, device)
    ledger: Ledger = HostLedger("full", pages) if kind == "host" else TensorLedger("full", pages, device)
    gate = EngineGate()
    engine = SyntheticEngine(ledger, gate, pages=pages, sequences=sequences)
    sidecar = Sidecar(Settings(enabled=True), engine="bench", engine_version="0", seed=0)
    sidecar.start()
    try:
        sidecar.attach(gate, [(ledger, [group])])
        seconds = []
        for index in range(_WARM_STEPS + steps):
            taken = engine.step_begins()
            _wait_for_the_device()
            taken += engine.step_ends()
            if index >= _WARM_STEPS:
                seconds.append(taken)
                if len(seconds) % 100 == 0:
                    each_hundred()
        snapshot = sidecar.settle()
    finally:
        sidecar.detach()
    counters = [group.counters for group in snapshot.groups]
    return HookRow(
        ledger=kind,
        device=device.type,
        sequences=sequences,
        pages=pages,
        steps=steps,
        median_us=median(seconds) * 1e6,
        p99_us=percentile(seconds, 0.99) * 1e6,
        maximum_us=max(seconds) * 1e6,
        sealed_pages=sum(one.sealed_pages for one in counters),
        mismatches=sum(sum(one.mismatches.values()) for one in counters),
    )


_PIECE = bytes(64 << 10)  # small enough to leave the caches to the thread


def _wait_for_the_device() -> None:
    """Between the two halves of a step: without the GIL, and spinning, as CUDA waits by default. A thread that slept
    instead would pay for a cold core with every line that comes next, an engine's or ours.
    """
    until = time.perf_counter() + FORWARD_SECONDS
    while time.perf_counter() < until:
        hashlib.sha256(_PIECE)


def small_pool(pages: int, device: torch.device) -> CanaryGroup:
    """Pages that are quick to read: this part is about events, not about bytes."""
    size = PAGE_TOKENS * _ROW_BYTES
    memory = torch.randint(0, 256, (_LAYERS * pages * size,), dtype=torch.uint8, device=device)
    buffers = [
        contiguous_buffer(
            f"layer.{layer}",
            layer,
            memory,
            offset=layer * pages * size,
            pages=pages,
            page_stride=size,
            rows=PAGE_TOKENS,
            row_bytes=_ROW_BYTES,
        )
        for layer in range(_LAYERS)
    ]
    return build_group("full", "full", buffers, coverage="all", page_tokens=PAGE_TOKENS)
