"""The numba kernels of the CPU backend. Importing this module imports numba; nothing is compiled before
`compiled_kernels`.

They read each page once, two pages at a time: the keys are loaded once for both, and two streams keep the memory
busier than one. Pages come in tiles: of one tensor the bytes of all pages of a tile, then those of the next tensor, so
that short rows are still read in long pieces. A kernel works in blocks of 64 words: a block is one vectorised loop,
and the lines that are needed `PREFETCH_BLOCKS` blocks later, in the next run if this one ends before, are asked for
ahead of it, because a loop with a multiplication in it leaves the processor too few loads in flight.
Compilation takes seconds and holds the GIL, so it happens at attach, and is cached on disk where that is possible.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.core import types as numba_types
from numba.extending import intrinsic

logger = logging.getLogger("kv_canary")

BLOCK_WORDS = 64
LINE_BYTES = 64
PREFETCH_BLOCKS = 2  # 1 KB in each of two streams: further ahead was not faster where it was measured

Kernel = Callable[..., Any]
types: Any = numba_types

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_EIGHT = np.uint64(8)
_BLOCK_BYTES = np.uint64(8 * BLOCK_WORDS)
_PREFETCH = np.uint64(8 * BLOCK_WORDS * PREFETCH_BLOCKS)

# Columns of a segment, see `cpu.Plan`
ADDRESS, STRIDE, WORDS, TAIL, KEY, GATHER = range(6)


def _pointer_to(kind: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.uint64), generate

    return pointer


_words_at = _pointer_to(types.uint64)
_bytes_at = _pointer_to(types.uint8)


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(typing_context: Any, address: Any) -> Any:
    """Asks for a cache line; an address that is not mapped is no fault."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, integer = ir.IntType(8).as_pointer(), ir.IntType(32)
        signature_ = ir.FunctionType(ir.VoidType(), [pointer, integer, integer, integer])
        function = cgutils.get_or_insert_function(builder.module, signature_, "llvm.prefetch.p0")
        read, keep, data = integer(0), integer(3), integer(1)
        builder.call(function, [builder.inttoptr(arguments[0], pointer), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.uint64), generate


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _term(word: Any, key: Any) -> Any:
    v = word ^ key
    return (v & _LOW) * (v >> _HALF) + ((word << _HALF) | (word >> _HALF))


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _splitmix(value: Any) -> Any:
    z = value + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _run_sums(base: Any, other: Any, count: Any, keys: Any, start: Any, ahead: Any, other_ahead: Any) -> Any:
    """Sums over `count` contiguous words at two places; their keys begin at `start`. The next runs begin at `ahead`."""
    total, other_total = np.uint64(0), np.uint64(0)
    blocks = count // BLOCK_WORDS
    within = max(0, blocks - PREFETCH_BLOCKS)
    for block in range(blocks):
        offset = np.uint64(block) * _BLOCK_BYTES
        if block < within:
            soon, other_soon = base + offset + _PREFETCH, other + offset + _PREFETCH
        else:
            over = np.uint64(block - within) * _BLOCK_BYTES
            soon, other_soon = ahead + over, other_ahead + over
        for line in range(8 * BLOCK_WORDS // LINE_BYTES):
            _prefetch(soon + np.uint64(LINE_BYTES * line))
            _prefetch(other_soon + np.uint64(LINE_BYTES * line))
        words = numba.carray(_words_at(base + offset), (BLOCK_WORDS,), dtype=np.uint64)
        others = numba.carray(_words_at(other + offset), (BLOCK_WORDS,), dtype=np.uint64)
        first = start + block * BLOCK_WORDS
        these = keys[first : first + BLOCK_WORDS]  # indices into a slice are known not to be negative: no test a word
        part, other_part = np.uint64(0), np.uint64(0)
        for i in range(BLOCK_WORDS):
            part += _term(words[i], these[i])
            other_part += _term(others[i], these[i])
        total += part
        other_total += other_part
    rest = count - blocks * BLOCK_WORDS
    done = np.uint64(blocks) * _BLOCK_BYTES
    words = numba.carray(_words_at(base + done), (rest,), dtype=np.uint64)
    others = numba.carray(_words_at(other + done), (rest,), dtype=np.uint64)
    these = keys[start + blocks * BLOCK_WORDS :]
    for i in range(rest):
        total += _term(words[i], these[i])
        other_total += _term(others[i], these[i])
    return total, other_total


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _tail_term(base: Any, size: Any, key: Any) -> Any:
    """The last word of a run, zero-padded from `size` bytes."""
    data = numba.carray(_bytes_at(base), (size,), dtype=np.uint8)
    word = np.uint64(0)
    for i in range(size):
        word |= np.uint64(data[i]) << (np.uint64(i) * _EIGHT)
    return _term(word, key)


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _gathered_sum(base: Any, size: Any, offsets: Any, position: Any, keys: Any, start: Any) -> Any:
    """Sum over `size` bytes that lie anywhere: byte i at `offsets[position + i]` from `base`."""
    total = np.uint64(0)
    for i in range((size + 7) // 8):
        word = np.uint64(0)
        for b in range(min(8, size - 8 * i)):
            byte = numba.carray(_bytes_at(base + np.uint64(offsets[position + 8 * i + b])), (1,), dtype=np.uint8)
            word |= np.uint64(byte[0]) << (np.uint64(b) * _EIGHT)
        total += _term(word, keys[start + i])
    return total


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _fingerprint_tile(
    pages: Any,
    begin: Any,
    end: Any,
    stripe: Any,
    next_begin: Any,
    next_stripe: Any,
    segments: Any,
    offsets: Any,
    starts: Any,
    lengths: Any,
    keys: Any,
    tile: Any,
    out: Any,
) -> None:
    """Fingerprints of the rows `begin` .. `end - 1` of `pages` in one stripe, into the first places of `out`.

    One segment after the other, two pages at a time, one from each half of the tile: of neighbouring pages each of the
    two streams goes on where it was, for as long as half a tile is. The next tile is named so that its first lines are
    under way.
    """
    for place in range(end - begin):
        out[place] = np.uint64(0)
    half = (end - begin + 1) // 2
    next_half = (min(next_begin + tile, len(pages)) - next_begin + 1) // 2
    last = starts[stripe + 1] - 1
    for s in range(starts[stripe], last + 1):
        count, tail, start = segments[s, WORDS], segments[s, TAIL], segments[s, KEY]
        for row in range(begin, begin + half):
            pair = row + half if row + half < end else row  # an odd row is a pair with itself
            base = np.uint64(segments[s, ADDRESS] + pages[row] * segments[s, STRIDE])
            other = np.uint64(segments[s, ADDRESS] + pages[pair] * segments[s, STRIDE])
            if segments[s, GATHER] >= 0:
                total = _gathered_sum(base, 8 * count + tail, offsets, segments[s, GATHER], keys, start)
                other_total = _gathered_sum(other, 8 * count + tail, offsets, segments[s, GATHER], keys, start)
            else:
                n, then, other_then = s, row + 1, pair + 1
                if then >= begin + half:
                    n, then, other_then = s + 1, begin, begin + half
                    if s == last:
                        n, then, other_then = starts[next_stripe], next_begin, next_begin + next_half
                other_then = min(other_then, len(pages) - 1)
                ahead = np.uint64(segments[n, ADDRESS] + pages[then] * segments[n, STRIDE])
                other_ahead = np.uint64(segments[n, ADDRESS] + pages[other_then] * segments[n, STRIDE])
                total, other_total = _run_sums(base, other, count, keys, start, ahead, other_ahead)
                if tail:
                    total += _tail_term(base + np.uint64(8 * count), tail, keys[start + count])
                    other_total += _tail_term(other + np.uint64(8 * count), tail, keys[start + count])
            out[row - begin] += total
            if pair != row:
                out[pair - begin] += other_total
    for place in range(end - begin):
        out[place] = _splitmix(out[place] ^ lengths[stripe])


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _place(step: Any, tiles: Any, stripes: Any, page_major: Any) -> Any:
    """Tile and stripe of a step, in the order in which addresses rise; the last one after the end."""
    step = min(step, tiles * stripes - 1)
    return (step // stripes, step % stripes) if page_major else (step % tiles, step // tiles)


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _step(
    step: Any,
    pages: Any,
    segments: Any,
    offsets: Any,
    starts: Any,
    lengths: Any,
    keys: Any,
    page_major: Any,
    tile: Any,
    out: Any,
) -> Any:
    """The step-th tile of one stripe: its first row, the row behind it, and the stripe; fingerprints are in `out`."""
    tiles, stripes = (len(pages) + tile - 1) // tile, len(starts) - 1
    here, stripe = _place(step, tiles, stripes, page_major)
    then, next_stripe = _place(step + 1, tiles, stripes, page_major)
    begin, end = here * tile, min((here + 1) * tile, len(pages))
    _fingerprint_tile(
        pages, begin, end, stripe, then * tile, next_stripe, segments, offsets, starts, lengths, keys, tile, out
    )
    return begin, end, stripe


def _read(
    pages: Any,
    segments: Any,
    offsets: Any,
    starts: Any,
    lengths: Any,
    keys: Any,
    page_major: Any,
    tile: Any,
    out: Any,
) -> None:
    seen = np.empty(tile, np.uint64)
    for step in range((len(pages) + tile - 1) // tile * (len(starts) - 1)):
        begin, end, stripe = _step(step, pages, segments, offsets, starts, lengths, keys, page_major, tile, seen)
        for row in range(begin, end):
            out[row, stripe] = seen[row - begin]


def _verify(
    pages: Any,
    segments: Any,
    offsets: Any,
    starts: Any,
    lengths: Any,
    keys: Any,
    page_major: Any,
    tile: Any,
    expected: Any,
    rows: Any,
    where: Any,
    found: Any,
) -> Any:
    seen = np.empty(tile, np.uint64)
    differences = 0
    for step in range((len(pages) + tile - 1) // tile * (len(starts) - 1)):
        begin, end, stripe = _step(step, pages, segments, offsets, starts, lengths, keys, page_major, tile, seen)
        for row in range(begin, end):
            if seen[row - begin] != expected[pages[row], stripe]:
                if differences < len(rows):
                    rows[differences], where[differences], found[differences] = row, stripe, seen[row - begin]
                differences += 1
    return differences


def _exchange(generation: Any, page: Any, expected_generation: Any, address: Any, old: Any, mask: Any) -> Any:
    if generation[page] != expected_generation:
        return -1
    byte = numba.carray(_bytes_at(address), (1,), dtype=np.uint8)
    before = byte[0]
    if old >= 0 and before != old:
        return -2
    byte[0] = before ^ np.uint8(mask)
    return int(before)


@lru_cache(maxsize=1)
def compiled_kernels() -> tuple[Kernel, Kernel, Kernel]:
    """(read, verify, exchange), compiled. Where no cache can be written they are compiled anew in each process."""
    try:
        return _compile(cache=True)
    except (RuntimeError, OSError) as error:
        logger.warning("kernels are compiled anew in this process: no cache (%s); set NUMBA_CACHE_DIR", error)
        return _compile(cache=False)


def _compile(*, cache: bool) -> tuple[Kernel, Kernel, Kernel]:
    read = numba.njit(nogil=True, cache=cache)(_read)
    verify = numba.njit(nogil=True, cache=cache)(_verify)
    exchange = numba.njit(cache=cache)(_exchange)  # keeps the GIL: see `cpu.exchange_byte`
    i64, u64, table = np.zeros(1, np.int64), np.zeros(1, np.uint64), np.zeros((1, 1), np.uint64)
    plan = (np.zeros((0, 6), np.int64), i64, i64, np.zeros(0, np.uint64), u64, True, 2)
    pages = np.zeros(0, np.int64)
    read(pages, *plan, table)
    verify(pages, *plan, table, i64, i64.copy(), u64.copy())
    scratch = np.zeros(1, np.uint8)
    exchange(i64, 0, 0, np.uint64(scratch.ctypes.data), -1, 0)
    return read, verify, exchange
