"""Runs of an engine with the canary off and on, and what they say: medians, and ratios of runs that were neighbours."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kv_canary.bench.timing import median, paired, percentile, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the engine over all prompts."""

    tokens_per_second: float
    step_seconds: tuple[float, ...]
    hook_seconds_per_step: float
    read_bytes_per_second: float
    mismatches: int


def side(runs: Sequence[Run]) -> dict[str, Any]:
    """Medians over the runs; a step's median and p99 are taken in each run."""
    rates = [run.tokens_per_second for run in runs]
    return {
        "tokens_per_second": median(rates),
        "tokens_per_second_runs": rates,
        "spread": spread(rates),
        "steps": len(runs[0].step_seconds),
        "step_median_ms": 1e3 * median([median(run.step_seconds) for run in runs]),
        "step_p99_ms": 1e3 * median([percentile(run.step_seconds, 0.99) for run in runs]),
        "hook_us_per_step": 1e6 * median([run.hook_seconds_per_step for run in runs]),
        "read_bytes_per_second": median([run.read_bytes_per_second for run in runs]),
        "mismatches": sum(run.mismatches for run in runs),
    }


def against(on: Sequence[Run], off: Sequence[Run]) -> dict[str, Any]:
    """Ratios of each round's run to the same round's run without the canary."""
    ratios = paired([run.tokens_per_second for run in on], [run.tokens_per_second for run in off])
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "throughput_ratio": median(ratios),
        "throughput_ratio_quartiles": [low, high],
        "throughput_ratios": ratios,
        "step_median_ratio": median(
            paired([median(run.step_seconds) for run in on], [median(run.step_seconds) for run in off])
        ),
        "step_p99_ratio": median(
            paired(
                [percentile(run.step_seconds, 0.99) for run in on], [percentile(run.step_seconds, 0.99) for run in off]
            )
        ),
    }
