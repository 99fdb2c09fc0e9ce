"""The definition of a fingerprint, in numpy. Every backend gives the same bits; the conformance suite holds that.

The logical byte string of a stripe is its buffers in order, each one's tokens in order, each buffer zero-padded to
whole 64-bit little-endian words. For word w_i with key k_i = splitmix64(SEED + i), v = w_i xor k_i:

    sum = sum over i of ( lo32(v) * hi32(v) + rot32(w_i) )   modulo 2^64
    fingerprint = splitmix64( sum xor splitmix64(number of bytes) )

The sum is associative and commutative: any chunking and any order gives the same bits. One word that changes always
changes the sum unless two 32-bit products meet (at worst 2^-32); the key makes words that trade places, and constant
rows, visible. The form is the inner product of NH/UMAC (Black et al., CRYPTO 1999) with a term that lets no zero factor
hide a word.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kv_canary.geometry import WORD, PageBuffer, Stripe
from kv_canary.identity import splitmix64, splitmix64_scalar

SEED = 0x6B76_6361_6E61_7279  # "kvcanary"

U64Array = npt.NDArray[np.uint64]
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def keys(words: int) -> U64Array:
    """k_0 .. k_(words-1)."""
    return keys_from(0, words)


def keys_from(first: int, words: int) -> U64Array:
    """k_first .. k_(first+words-1)."""
    with np.errstate(over="ignore"):
        return splitmix64(np.arange(first, first + words, dtype=np.uint64) + np.uint64(SEED))


def word_sum(words: U64Array, first: int = 0) -> int:
    """The sum over `words`, which are words `first`, `first + 1`, ... of the stripe."""
    with np.errstate(over="ignore"):
        v = words ^ keys_from(first, len(words))
        terms = (v & _LOW) * (v >> _32) + ((words << _32) | (words >> _32))
        return int(terms.sum(dtype=np.uint64))


def finish(total: int, length: int) -> int:
    """The fingerprint of a sum over `length` bytes."""
    return splitmix64_scalar(total ^ splitmix64_scalar(length))


def fingerprint_bytes(parts: list[bytes]) -> int:
    """Fingerprint of a stripe whose buffers hold `parts`, in logical order."""
    total = first = 0
    for part in parts:
        padded = part + bytes(-len(part) % WORD)
        total += word_sum(np.frombuffer(padded, dtype="<u8").astype(np.uint64), first)
        first += len(padded) // WORD
    return finish(total & ((1 << 64) - 1), sum(len(part) for part in parts))


def zero_fingerprint(stripe: Stripe) -> int:
    """Fingerprint of a page of zeros."""
    return fingerprint_bytes([bytes(buffer.bytes_per_page) for buffer in stripe.buffers])


def read_page(buffer: PageBuffer, page: int) -> bytes:
    """The logical byte string of one page (CPU memory only; slow, for the definition and for tests)."""
    import ctypes

    out = bytearray(buffer.bytes_per_page)
    start = buffer.address + page * buffer.page_stride
    for memory, logical in run_offsets(buffer):
        out[logical : logical + buffer.run_bytes] = ctypes.string_at(start + memory, buffer.run_bytes)
    return bytes(out)


def run_offsets(buffer: PageBuffer) -> list[tuple[int, int]]:
    """(memory offset, logical offset) in bytes of every run of a page, in memory order."""
    runs = [(0, 0)]
    for axis in buffer.axes:
        runs = [(m + i * axis.memory_stride, g + i * axis.logical_stride) for m, g in runs for i in range(axis.count)]
    return sorted(runs)


def fingerprint_page(stripe: Stripe, page: int) -> int:
    """The definition, applied to one page of one stripe."""
    return fingerprint_bytes([read_page(buffer, page) for buffer in stripe.buffers])
