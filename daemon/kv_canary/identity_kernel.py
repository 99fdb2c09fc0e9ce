"""`identity.extend_each`, compiled: for the engine's thread, where a decode step should cost microseconds.

Importing this module imports numba. Compilation takes about a second and is cached where possible, so an adapter asks
for `compiled_extend_each` when it attaches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numba
import numpy as np

from kv_canary.identity import MULTIPLIER, POSITION, Prefix

logger = logging.getLogger("kv_canary")

ExtendEach = Callable[[Sequence[Prefix], Sequence[Sequence[int]]], tuple[list[Prefix], list[int]]]

_MULTIPLIER, _POSITION = np.uint64(MULTIPLIER), np.uint64(POSITION)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _splitmix(value: Any) -> Any:
    z = value + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))


def _extend(rows: Any) -> None:
    """Each row of `rows`, uint64 [prefixes, 2 + tokens], is a state, a length and tokens; the first two become the
    state after the tokens and its identity.
    """
    for row in range(rows.shape[0]):
        state = rows[row, 0]
        for column in range(2, rows.shape[1]):
            state = state * _MULTIPLIER + _splitmix(rows[row, column] + np.uint64(1))
        length = rows[row, 1] + np.uint64(rows.shape[1] - 2)
        identity = _splitmix(state ^ (length * _POSITION))
        rows[row, 0] = state
        rows[row, 1] = identity if identity else np.uint64(1)


@lru_cache(maxsize=1)
def compiled_extend_each() -> ExtendEach:
    """The compiled form; compiles now."""
    try:
        kernel = numba.njit(cache=True)(_extend)
    except (RuntimeError, OSError) as error:
        logger.warning("kernels are compiled anew in this process: no cache (%s); set NUMBA_CACHE_DIR", error)
        kernel = numba.njit(_extend)

    def extend_each(prefixes: Sequence[Prefix], tokens: Sequence[Sequence[int]]) -> tuple[list[Prefix], list[int]]:
        if not prefixes:
            return [], []
        # one array for all: each that is made costs the engine's thread a microsecond, or five when it was idle
        flat: list[int] = []
        for prefix, ones in zip(prefixes, tokens, strict=True):
            state = prefix.value
            flat += (state - (1 << 64) if state >> 63 else state, prefix.length)
            flat += ones
        rows = np.array(flat, np.int64).view(np.uint64).reshape(len(prefixes), -1)
        kernel(rows)
        states, identities = rows[:, 0].tolist(), rows.view(np.int64)[:, 1].tolist()
        count = rows.shape[1] - 2
        return [Prefix(state, p.length + count) for state, p in zip(states, prefixes, strict=True)], identities

    extend_each([Prefix.empty()], [[1]])
    return extend_each
