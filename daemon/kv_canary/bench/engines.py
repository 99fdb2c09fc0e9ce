"""The engine part: what an engine loses under the canary. The daemon imports no engine, so it is found by name.

An entry point of the group `kv_canary.bench` is a function `measure(request) -> document`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from kv_canary.errors import KVCanaryError
from kv_canary.settings import Budget

ENTRY_POINT_GROUP = "kv_canary.bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What to measure: the engine off, and on with each of `budgets`, taking turns `repeats` times.

    `each_part` is told what share of `repeats * (1 + len(budgets))` runs is done since it was told last.
    """

    device: str
    budgets: tuple[Budget, ...]
    repeats: int
    each_part: Callable[[float], None] = lambda share: None


def find_engine(name: str) -> Callable[[EngineRequest], dict[str, Any]]:
    """The engine part of this name; raises `KVCanaryError` that lists those that are installed."""
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in points:
        names = ", ".join(sorted(points)) or "none"
        raise KVCanaryError(f"--engine: there is no bench for engine {name!r}; there are: {names}\n{_INSTALL}")
    try:
        measure: Callable[[EngineRequest], dict[str, Any]] = points[name].load()
    except ImportError as error:
        raise KVCanaryError(f"--engine: the bench for {name} cannot be loaded: {error}\n{_INSTALL}") from error
    return measure


_INSTALL = "pip install 'kv-canary[demo]'"
