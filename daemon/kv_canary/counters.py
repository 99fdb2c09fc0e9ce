"""Running totals of one canary group. Written by the canary thread alone; `frozen` makes the copy that is published."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from types import MappingProxyType

from kv_canary.snapshot import (
    PURPOSES,
    SWEEP_DURATION_BUCKETS,
    SWEEP_RESULTS,
    TRANSFER_RESULTS,
    Check,
    GroupCounters,
    Persistence,
    Purpose,
    Source,
)


def _purposes() -> dict[Purpose, int]:
    return dict.fromkeys(PURPOSES, 0)


@dataclass(slots=True)
class Counters:
    """Counters only go up; pages and bytes are counted when they were read, whatever came out of it."""

    mismatches: dict[tuple[Check, Persistence, Source], int] = field(default_factory=dict)
    read_bytes: dict[Purpose, int] = field(default_factory=_purposes)
    kernel_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PURPOSES, 0.0))
    verified_pages: int = 0
    sealed_pages: int = 0
    superseded: int = 0
    sweeps: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SWEEP_RESULTS, 0))
    sweep_duration_buckets: list[int] = field(default_factory=lambda: [0] * (len(SWEEP_DURATION_BUCKETS) + 1))
    sweep_duration_sum: float = 0.0
    transfers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TRANSFER_RESULTS, 0))

    def mismatch(self, check: Check, persistence: Persistence, source: Source) -> None:
        key = (check, persistence, source)
        self.mismatches[key] = self.mismatches.get(key, 0) + 1

    def read(self, purpose: Purpose, size_bytes: int, seconds: float) -> None:
        self.read_bytes[purpose] += size_bytes
        self.kernel_seconds[purpose] += seconds

    def sweep(self, result: str, seconds: float) -> None:
        self.sweeps[result] += 1
        self.sweep_duration_buckets[bisect_left(SWEEP_DURATION_BUCKETS, seconds)] += 1
        self.sweep_duration_sum += seconds

    def frozen(self, *, claims: int, claims_not_covered: int) -> GroupCounters:
        return GroupCounters(
            mismatches=MappingProxyType(dict(self.mismatches)),
            read_bytes=MappingProxyType(dict(self.read_bytes)),
            verified_pages=self.verified_pages,
            sealed_pages=self.sealed_pages,
            claims=claims,
            claims_not_covered=claims_not_covered,
            superseded=self.superseded,
            sweeps=MappingProxyType(dict(self.sweeps)),
            sweep_duration_buckets=tuple(self.sweep_duration_buckets),
            sweep_duration_sum=self.sweep_duration_sum,
            transfers=MappingProxyType(dict(self.transfers)),
        )
