"""What a fingerprint that is wrong says about the damage. Pure functions over numpy arrays; for the canary thread.

The finaliser is a bijection, so the sum over a stripe's words comes back from its fingerprint. If exactly one bit of
one word changed, the difference of the two sums is one of 64 values for that word, and each of them follows from the
word as it is *now*: with v = w xor k, flipping bit b of the low half changes the term by (+-hi32(v) +- 2^32) * 2^b, of
the high half by (+-lo32(v) +- 1) * 2^b, with the signs of the bits as they are found. So all of 64 * words possible
flips are tried against one 64-bit number, and damage of any other kind passes for one with a chance of 64 * words /
2^64. Flips of several bits of one half word never do: a sum of different powers of two with these signs is no other
power of two.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kv_canary.fingerprint import spec
from kv_canary.identity import splitmix64_scalar

U64Array = npt.NDArray[np.uint64]

CHUNK_WORDS = 4096

_MASK = (1 << 64) - 1
_FIRST_INVERSE = pow(0xBF58476D1CE4E5B9, -1, 1 << 64)
_SECOND_INVERSE = pow(0x94D049BB133111EB, -1, 1 << 64)
_ONE, _32 = np.uint64(1), np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


def unmix(value: int) -> int:
    """The number of which `splitmix64` is `value`."""
    z = value ^ (value >> 31) ^ (value >> 62)
    z = (z * _SECOND_INVERSE) & _MASK
    z ^= (z >> 27) ^ (z >> 54)
    z = (z * _FIRST_INVERSE) & _MASK
    z ^= (z >> 30) ^ (z >> 60)
    return (z - 0x9E3779B97F4A7C15) & _MASK


def sum_of(fingerprint: int, length: int) -> int:
    """The sum that `spec.finish` made the fingerprint of, over `length` bytes."""
    return unmix(fingerprint) ^ splitmix64_scalar(length)


def fingerprint_of(words: U64Array, length: int, breathe: Callable[[], None] = lambda: None) -> int:
    """`spec.fingerprint_bytes` of words that are at hand, in pieces."""
    total = 0
    for first in range(0, len(words), CHUNK_WORDS):
        total += spec.word_sum(words[first : first + CHUNK_WORDS], first)
        breathe()
    return spec.finish(total & _MASK, length)


def single_flips(
    words: U64Array, expected: int, found: int, length: int, breathe: Callable[[], None] = lambda: None
) -> list[tuple[int, int]]:
    """Every (word, bit) such that flipping that one bit of `words`, as they are found, gives the expected fingerprint.

    `words` are the whole stripe, of `length` bytes, whose fingerprint is `found`.
    """
    difference = (sum_of(found, length) - sum_of(expected, length)) & _MASK
    if not difference:
        return []
    # a flip of bit b changes the sum by a multiple of 2^b, so only the lowest few have to be tried
    powers = min(31, (difference & -difference).bit_length() - 1)
    wanted = np.uint64(difference)
    hits: list[tuple[int, int]] = []
    for first in range(0, len(words), CHUNK_WORDS):
        part = words[first : first + CHUNK_WORDS]
        v = part ^ spec.keys_from(first, len(part))
        low, high = v & _LOW, v >> _32
        for bit in range(powers + 1):
            for half, other, step in ((0, high, _32), (32, low, np.uint64(0))):
                place = np.uint64(bit + half)
                delta = (_sign(v, place) * other + (_sign(part, place) << step)) << np.uint64(bit)
                hits += [(first + int(word), bit + half) for word in np.flatnonzero(delta == wanted)]
        breathe()
    return hits


def _sign(values: U64Array, bit: np.uint64) -> U64Array:
    """+1 where the bit is set, -1 (modulo 2^64) where it is not."""
    signs: U64Array = (((values >> bit) & _ONE) << _ONE) - _ONE
    return signs
