"""How things are measured: contenders take turns, A B A B, so that a machine that slows down slows down all of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

Contender = Callable[[], int]
"""Does one pass and returns the bytes that it read; what it started has finished when it returns."""


def interleaved(
    contenders: Mapping[str, Contender], rounds: int, *, each_round: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Bytes a second of every contender in every round. A pass before the first round warms up and is not counted."""
    for contender in contenders.values():
        contender()
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            started = perf_counter()
            size = contender()
            rates[name].append(size / (perf_counter() - started))
        each_round()
    return rates


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all values do not exceed (nearest rank)."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


def spread(values: Sequence[float]) -> float:
    """Distance between the quartiles over the median: how noisy it was. 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def paired(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Ratio of each round's value to the same round's base."""
    return [value / reference for value, reference in zip(values, base, strict=True)]
