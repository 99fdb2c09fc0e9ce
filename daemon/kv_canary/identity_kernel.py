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


def _extend(tokens: Any, states: Any, lengths: Any, identities: Any) -> None:
    """`states` and `lengths` (uint64, one a prefix) become those after `tokens`, int64 [prefixes, tokens]."""
    for row in range(tokens.shape[0]):
        state = states[row]
        for column in range(tokens.shape[1]):
            state = state * _MULTIPLIER + _splitmix(np.uint64(tokens[row, column]) + np.uint64(1))
        length = lengths[row] + np.uint64(tokens.shape[1])
        identity = _splitmix(state ^ (length * _POSITION))
        states[row], lengths[row] = state, length
        identities[row] = np.int64(identity) if identity else 1


@lru_cache(maxsize=1)
def compiled_extend_each() -> ExtendEach:
    """The compiled form; compiles now."""
    try:
        kernel = numba.njit(cache=True)(_extend)
    except (RuntimeError, OSError) as error:
        logger.warning("kernels are compiled anew in this process: no cache (%s); set NUMBA_CACHE_DIR", error)
        kernel = numba.njit(_extend)

    def extend_each(prefixes: Sequence[Prefix], tokens: Sequence[Sequence[int]]) -> tuple[list[Prefix], list[int]]:
        states = np.array([prefix.value for prefix in prefixes], np.uint64)
        lengths = np.array([prefix.length for prefix in prefixes], np.uint64)
        identities = np.empty(len(prefixes), np.int64)
        kernel(np.array(tokens, np.int64).reshape(len(prefixes), -1), states, lengths, identities)
        extended = [Prefix(value, length) for value, length in zip(states.tolist(), lengths.tolist(), strict=True)]
        return extended, identities.tolist()

    extend_each([Prefix.empty()], [[1]])
    return extend_each
