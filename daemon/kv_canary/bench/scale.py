"""How things grow with the pool: seconds of a full sweep, memory of fingerprints and ledger, cost of the hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kv_canary.bench.bandwidth import measure_bandwidth
from kv_canary.bench.hooks import measure_hooks
from kv_canary.bench.memory import free_bytes, random_memory
from kv_canary.bench.presets import Preset
from kv_canary.settings import Settings

CPU_SIZES_GB = (1, 2, 4, 8, 16)
CUDA_SIZES_GB = (1, 4, 16, 64, 100)
SEQUENCES = 64
HOOK_STEPS = 400
_SHARE = 0.8  # of the free memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRow:
    """One pool size."""

    preset: str
    device: str
    pool_bytes: int
    pages: int
    sweep_seconds: float  # back to back, in launches as the scrubber makes them
    paced_sweep_seconds: float  # at the default budget; computed from the bandwidth, not measured
    gbps: float
    ratio: float
    fingerprint_bytes: int
    ledger_bytes: int
    memory_ratio: float
    hooks_median_us: float
    hooks_p99_us: float

    def as_document(self) -> dict[str, Any]:
        return asdict(self)


def pool_sizes(device: torch.device) -> list[int]:
    """Bytes; those that fit into the memory that is free, or half of that if none does."""
    free = int(free_bytes(device) * _SHARE)
    sizes = [gb * 10**9 for gb in (CUDA_SIZES_GB if device.type == "cuda" else CPU_SIZES_GB)]
    return [size for size in sizes if size <= free] or [free // 2]


def measure_scale(
    preset: Preset,
    device: torch.device,
    sizes: list[int],
    *,
    threads: int,
    repeats: int,
    each_round: Callable[[], None] = lambda: None,
) -> Iterator[ScaleRow]:
    """One row a size, over one piece of memory of the largest. Sets torch's number of threads."""
    memory = random_memory(max(sizes), device)
    budget = Settings().budget
    for size in sizes:
        row = measure_bandwidth(preset, memory[:size], threads=threads, repeats=repeats, each_round=each_round)
        hooks = measure_hooks(
            "host", sequences=SEQUENCES, device=torch.device("cpu"), pages=row.pages, steps=HOOK_STEPS
        )
        each_round()
        covered = row.pages * row.bytes_per_page
        yield ScaleRow(
            preset=preset.name,
            device=row.device,
            pool_bytes=row.pool_bytes,
            pages=row.pages,
            sweep_seconds=covered / (row.gbps * 1e9),
            paced_sweep_seconds=covered / budget.resolve(row.gbps * 1e9),
            gbps=row.gbps,
            ratio=row.ratio,
            fingerprint_bytes=row.fingerprint_bytes,
            ledger_bytes=row.ledger_bytes,
            memory_ratio=row.memory_ratio,
            hooks_median_us=hooks.median_us,
            hooks_p99_us=hooks.p99_us,
        )
