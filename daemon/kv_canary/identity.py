"""Identity: a 64-bit hash of the whole token prefix that a page's KV depends on.

With m(x) = splitmix64(x) and an odd multiplier M, all modulo 2^64:

    h(0) = m(salt)          h(n) = h(n-1) * M + m(token n + 1)          identity(n) = m(h(n) xor n * C), never 0

h is a polynomial, so a whole prompt is done in a few vector operations (powers of M have inverses modulo 2^64), on a
host array and on a device tensor alike, and any way of cutting the prompt into chunks gives the same values. The
position is in n. 0 means "not known". The hash is our own on purpose: a fault in the engine's hashing shows as a
difference. It is no defence against somebody who constructs collisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

UNKNOWN_IDENTITY = 0

_MASK = (1 << 64) - 1
MULTIPLIER = 0xD1342543DE82EF95
_INVERSE = pow(MULTIPLIER, -1, 1 << 64)
POSITION = 0x9E3779B97F4A7C15

_U64 = np.uint64
_GOLDEN, _FIRST, _SECOND = _U64(0x9E3779B97F4A7C15), _U64(0xBF58476D1CE4E5B9), _U64(0x94D049BB133111EB)
_30, _27, _31 = _U64(30), _U64(27), _U64(31)


def splitmix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of Steele, Lea and Flood (OOPSLA 2014), elementwise on uint64."""
    z = values + _GOLDEN
    z ^= z >> _30
    z *= _FIRST
    z ^= z >> _27
    z *= _SECOND
    z ^= z >> _31
    return z


def splitmix64_scalar(value: int) -> int:
    """`splitmix64` of one Python int."""
    z = (value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def salt_from(*parts: str | bytes | int) -> int:
    """A 64-bit salt from whatever else the KV depends on: adapter name, image hashes, a cache salt. No parts: 0."""
    import hashlib

    if not parts:
        return 0
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little")


@dataclass(frozen=True, slots=True)
class Prefix:
    """State of the hash after `length` tokens."""

    value: int
    length: int

    @classmethod
    def empty(cls, salt: int = 0) -> Prefix:
        return cls(splitmix64_scalar(salt), 0)

    @property
    def identity(self) -> int:
        """The identity of the whole prefix, an int64 like those of `extended`."""
        unsigned = splitmix64_scalar(self.value ^ ((self.length * POSITION) & _MASK)) or 1
        return unsigned - (1 << 64) if unsigned >> 63 else unsigned

    def extended(self, tokens: Sequence[int], page_tokens: int) -> tuple[Prefix, npt.NDArray[np.int64]]:
        """Appends `tokens`, whole pages of `page_tokens`; returns the new state and the identity at each page's end.

        The identities are int64, bit for bit the unsigned value.
        """
        count = len(tokens)
        if count % page_tokens:
            raise ValueError(f"{count} tokens are no whole number of pages of {page_tokens}")
        if not count:
            return self, np.empty(0, np.int64)
        with np.errstate(over="ignore"):
            mixed = splitmix64(np.asarray(tokens, np.int64).view(np.uint64) + _U64(1))
            powers, inverses = _powers(count)
            # h(n) = M^n * (h(0) + sum over i <= n of m(t_i) * M^-i)
            sums = np.cumsum(mixed * inverses[1 : count + 1], dtype=np.uint64) + _U64(self.value)
            ends = np.arange(page_tokens, count + 1, page_tokens)
            states = powers[ends] * sums[ends - 1]
            lengths = (ends.astype(np.uint64) + _U64(self.length)) * _U64(POSITION)
            identities = splitmix64(states ^ lengths)
        identities[identities == 0] = 1
        return Prefix(int(states[-1]), self.length + count), identities.view(np.int64)


def extend_each(prefixes: Sequence[Prefix], tokens: Sequence[Sequence[int]]) -> tuple[list[Prefix], list[int]]:
    """Appends to each prefix its own tokens, as many for all: one page each, as the sequences of a decode step do.

    Returns the new states and their identities. `identity_kernel` has it compiled, for the engine's thread.
    """
    if not prefixes:
        return [], []
    count = len(tokens[0])
    # arrays of unsigned integers wrap around without a warning; only scalars would need np.errstate
    mixed = splitmix64(np.array(tokens, np.int64).view(np.uint64) + _U64(1))
    mixed *= _falling_powers(count)
    states = np.array([prefix.value for prefix in prefixes], np.uint64)
    states *= _powers(count)[0][count]
    states += np.add.reduce(mixed, axis=1)
    identities = np.array([(prefix.length + count) * POSITION & _MASK for prefix in prefixes], np.uint64)
    identities = splitmix64(np.bitwise_xor(identities, states, out=identities))
    identities[identities == 0] = 1
    values = zip(states.tolist(), prefixes, strict=True)
    return [Prefix(value, prefix.length + count) for value, prefix in values], identities.view(np.int64).tolist()


@lru_cache(maxsize=16)
def _falling_powers(count: int) -> npt.NDArray[np.uint64]:
    """M^(count-1) .. M^0."""
    return np.ascontiguousarray(_powers(count)[0][:count][::-1])


_power_table: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]] = (np.ones(1, np.uint64), np.ones(1, np.uint64))


def _powers(count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """M^0..M^count and their inverses. Replaced as a whole when it must grow, so that any thread may read it."""
    global _power_table
    if len(_power_table[0]) <= count:
        size = max(4096, 2 * count) + 1
        base = np.full(size, MULTIPLIER, np.uint64)
        inverse = np.full(size, _INVERSE, np.uint64)
        base[0] = inverse[0] = 1
        with np.errstate(over="ignore"):
            _power_table = (np.multiply.accumulate(base), np.multiply.accumulate(inverse))
    return _power_table
