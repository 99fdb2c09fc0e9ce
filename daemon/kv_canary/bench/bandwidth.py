"""Bandwidth of one preset: how fast its pages are verified and sealed, beside the limit measured in the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import monotonic, perf_counter
from typing import Any

import numpy as np
import torch

from kv_canary.bench.contenders import ceilings, launches, peers, seal_pass, verify_pass
from kv_canary.bench.presets import Preset
from kv_canary.bench.timing import interleaved, median, paired, spread
from kv_canary.fingerprint.backends import open_table
from kv_canary.fingerprint.table import FingerprintTable
from kv_canary.geometry import CanaryGroup
from kv_canary.ledger import HostLedger
from kv_canary.scrubber import CPU_LAUNCH_SECONDS, LAUNCH_SECONDS
from kv_canary.verifier import Verifier

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthRow:
    """One preset's figures. Rates are medians, in GB/s (10^9 bytes)."""

    preset: str
    backend: str
    device: str
    threads: int
    pages: int
    bytes_per_page: int
    run_bytes: int  # the longest contiguous piece of a page
    stripes: int
    pool_bytes: int
    launch_pages: int
    gbps: float  # verify, in launches as the scrubber makes them
    whole_gbps: float  # verify, the whole pool in one call
    seal_gbps: float
    ceiling_gbps: float
    ceiling: str  # what was the fastest
    ratio: float  # gbps over ceiling_gbps
    whole_ratio: float
    xxh3_gbps: float | None
    sglang_reference_gbps: float | None
    fingerprint_bytes: int
    ledger_bytes: int
    memory_ratio: float  # fingerprints, baseline and ledger over the pool
    repeats: int
    spread: float  # distance between the quartiles of the rounds' ratios over their median

    def as_document(self) -> dict[str, Any]:
        return asdict(self)


def measure_bandwidth(
    preset: Preset,
    memory: torch.Tensor,
    *,
    threads: int,
    repeats: int,
    each_round: Callable[[], None] = lambda: None,
) -> BandwidthRow:
    """Lays `preset` over `memory` (uint8, random bytes) and measures. Sets torch's number of threads."""
    torch.set_num_threads(threads)
    group = preset.build(memory)
    used = memory[: group.pages * preset.memory_bytes_per_page]
    limits = ceilings(used)
    for limit in limits.values():
        limit()  # a copy changes bytes, once: before anything is sealed
    table = open_table(group, threads=threads)
    whole = np.arange(group.pages, dtype=np.int64)
    table.store(whole, table.read(whole))
    launch_seconds = CPU_LAUNCH_SECONDS if group.device.type == "cpu" else LAUNCH_SECONDS
    windows = launches(group, int(read_rate(table, group) * launch_seconds))
    rates = interleaved(
        {
            "verify": verify_pass(table, group, windows),
            **limits,
            "seal": seal_pass(table, group, windows),
            "whole": verify_pass(table, group, [whole]),
            **peers(group),
        },
        repeats,
        each_round=each_round,
    )
    best = max(limits, key=lambda name: median(rates[name]))
    ceiling = median(rates[best])
    fingerprint_bytes, ledger_bytes = memory_of_guard(group, table)
    pool_bytes = group.pages * preset.memory_bytes_per_page
    return BandwidthRow(
        preset=preset.name,
        backend=table.backend,
        device=group.device.type,
        threads=threads,
        pages=group.pages,
        bytes_per_page=group.bytes_per_page,
        run_bytes=preset.run_bytes,
        stripes=len(group.stripes),
        pool_bytes=pool_bytes,
        launch_pages=len(windows[0]),
        gbps=median(rates["verify"]) / GB,
        whole_gbps=median(rates["whole"]) / GB,
        seal_gbps=median(rates["seal"]) / GB,
        ceiling_gbps=ceiling / GB,
        ceiling=best,
        ratio=median(rates["verify"]) / ceiling,
        whole_ratio=median(rates["whole"]) / ceiling,
        xxh3_gbps=_rate(rates, "xxh3"),
        sglang_reference_gbps=_rate(rates, "sglang_reference"),
        fingerprint_bytes=fingerprint_bytes,
        ledger_bytes=ledger_bytes,
        memory_ratio=(fingerprint_bytes + ledger_bytes) / pool_bytes,
        repeats=repeats,
        spread=spread(paired(rates["verify"], rates[best])),
    )


def _rate(rates: Mapping[str, Sequence[float]], name: str) -> float | None:
    return median(rates[name]) / GB if name in rates else None


def read_rate(table: FingerprintTable, group: CanaryGroup, *, sample_bytes: int = 256 << 20) -> float:
    """Bytes a second at which the table reads: the better of two passes over a sample, as the sidecar does it."""
    pages = np.arange(max(1, min(group.pages, sample_bytes // group.bytes_per_page)), dtype=np.int64)
    best = 0.0
    for _ in range(2):
        started = perf_counter()
        table.read(pages)
        best = max(best, len(pages) * group.bytes_per_page / (perf_counter() - started))
    return best


def memory_of_guard(group: CanaryGroup, table: FingerprintTable) -> tuple[int, int]:
    """Bytes that guarding this pool takes: (fingerprints and baseline, ledger)."""
    ledger = HostLedger(group.name, group.pages)
    return Verifier(group, ledger, table, watch=lambda: 0, monotonic=monotonic).nbytes, ledger.nbytes
