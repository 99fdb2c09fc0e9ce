"""CPU backend: numba kernels that read each page once, in address order, with the GIL released.

Used by the canary thread. Compilation takes seconds and holds the GIL, so it happens when the first table is opened, at
attach, and is cached on disk where that is possible.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_canary.errors import GeometryError
from kv_canary.fingerprint import spec
from kv_canary.fingerprint.table import Differences, FingerprintArray, PageArray
from kv_canary.geometry import WORD, CanaryGroup, PageBuffer
from kv_canary.identity import splitmix64_scalar

logger = logging.getLogger("kv_canary")

_MAXIMUM_DIFFERENCES = 4096  # rows kept of one launch; a page that does not fit is found by the next sweep
Kernel = Callable[..., Any]


class Plan:
    """A group's geometry as flat arrays for the kernels.

    A segment is a run that starts on a word of the logical string: `address`, `stride` from page to page, whole
    `words`, `tail` bytes after them (0 to 7), and `key`, the index of its first word in the stripe. A buffer whose runs
    do not start on words has one *gathered* segment instead: `words` and `tail` count its logical bytes, and `gather`
    says where in `offsets` the memory offset of each of them is found (-1: not gathered).
    """

    def __init__(self, group: CanaryGroup) -> None:
        rows: list[tuple[int, int, int, int, int, int]] = []
        offsets: list[npt.NDArray[np.int64]] = []
        offset_count = 0
        starts = [0]
        for stripe in group.stripes:
            key = 0
            for buffer in stripe.buffers:
                if _is_word_aligned(buffer):
                    for memory, logical in spec.run_offsets(buffer):
                        rows.append(
                            (
                                buffer.address + memory,
                                buffer.page_stride,
                                buffer.run_bytes // WORD,
                                buffer.run_bytes % WORD,
                                key + logical // WORD,
                                -1,
                            )
                        )
                else:
                    size = buffer.bytes_per_page
                    table = np.empty(size, np.int64)
                    for memory, logical in spec.run_offsets(buffer):
                        table[logical : logical + buffer.run_bytes] = np.arange(memory, memory + buffer.run_bytes)
                    rows.append((buffer.address, buffer.page_stride, size // WORD, size % WORD, key, offset_count))
                    offsets.append(table)
                    offset_count += size
                key += buffer.words
            starts.append(len(rows))
        columns = list(zip(*rows, strict=True)) if rows else [()] * 6
        self.address = np.array(columns[0], np.uint64)
        self.stride = np.array(columns[1], np.int64)
        self.words = np.array(columns[2], np.int64)
        self.tail = np.array(columns[3], np.int64)
        self.key = np.array(columns[4], np.int64)
        self.gather = np.array(columns[5], np.int64)
        self.offsets = np.concatenate(offsets) if offsets else np.zeros(1, np.int64)
        self.starts = np.array(starts, np.int64)
        self.lengths = np.array([splitmix64_scalar(stripe.bytes_per_page) for stripe in group.stripes], np.uint64)
        self.keys = spec.keys(max((stripe.words for stripe in group.stripes), default=1))
        # Stripes that lie inside one page are read page after page, stripes in tensors of their own one tensor after
        # the other: either way addresses rise.
        bases = [stripe.buffers[0].address for stripe in group.stripes]
        self.page_major = len(bases) < 2 or max(bases) - min(bases) < min(b.page_stride for b in group.buffers)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (
            self.address,
            self.stride,
            self.words,
            self.tail,
            self.key,
            self.gather,
            self.offsets,
            self.starts,
            self.lengths,
            self.keys,
            self.page_major,
        )


def _is_word_aligned(buffer: PageBuffer) -> bool:
    single = not buffer.axes
    logical = single or (buffer.run_bytes % WORD == 0 and all(axis.logical_stride % WORD == 0 for axis in buffer.axes))
    memory = (buffer.address | buffer.page_stride) % WORD == 0 and all(
        axis.memory_stride % WORD == 0 for axis in buffer.axes
    )
    return logical and memory


@lru_cache(maxsize=1)
def compiled_kernels() -> tuple[Kernel, Kernel, Kernel]:
    """(read, verify, exchange), compiled.

    Falls back to compiling anew in each process where no cache can be written.
    """
    try:
        return _compile(cache=True)
    except (RuntimeError, OSError) as error:
        logger.warning(
            "kernels are compiled anew in this process: no cache (%s); set NUMBA_CACHE_DIR to a folder", error
        )
        return _compile(cache=False)


def _compile(*, cache: bool) -> tuple[Kernel, Kernel, Kernel]:
    import numba
    from numba.core import types as numba_types
    from numba.extending import intrinsic

    types: Any = numba_types

    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(types.uint64)(types.uint64), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def byte_pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(types.uint8)(types.uint64), generate

    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    eight = np.uint64(8)

    @numba.njit(inline="always")  # type: ignore[untyped-decorator]
    def term(word: Any, key: Any) -> Any:
        v = word ^ key
        return (v & low) * (v >> half) + ((word << half) | (word >> half))

    @numba.njit(inline="always")  # type: ignore[untyped-decorator]
    def splitmix(value: Any) -> Any:
        z = value + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def stripe_sum(
        page: Any,
        first: Any,
        last: Any,
        address: Any,
        stride: Any,
        words: Any,
        tail: Any,
        key: Any,
        gather: Any,
        offsets: Any,
        keys: Any,
    ) -> Any:
        total = np.uint64(0)
        for segment in range(first, last):
            base = address[segment] + np.uint64(page * stride[segment])
            count = words[segment]
            start = key[segment]
            if gather[segment] < 0:
                data = numba.carray(pointer(base), (count,), dtype=np.uint64)
                part = np.uint64(0)
                ks = keys[start : start + count]
                for i in range(count):
                    part += term(data[i], ks[i])
                total += part
                if tail[segment]:
                    rest = numba.carray(byte_pointer(base + np.uint64(8 * count)), (tail[segment],), dtype=np.uint8)
                    word = np.uint64(0)
                    for i in range(tail[segment]):
                        word |= np.uint64(rest[i]) << (np.uint64(i) * eight)
                    total += term(word, keys[start + count])
            else:
                size = 8 * count + tail[segment]
                position = gather[segment]
                for i in range((size + 7) // 8):
                    word = np.uint64(0)
                    for b in range(min(8, size - 8 * i)):
                        byte = numba.carray(
                            byte_pointer(base + np.uint64(offsets[position + 8 * i + b])), (1,), dtype=np.uint8
                        )
                        word |= np.uint64(byte[0]) << (np.uint64(b) * eight)
                    total += term(word, keys[start + i])
        return total

    @numba.njit(nogil=True, cache=cache)  # type: ignore[untyped-decorator]
    def read(
        pages: Any,
        address: Any,
        stride: Any,
        words: Any,
        tail: Any,
        key: Any,
        gather: Any,
        offsets: Any,
        starts: Any,
        lengths: Any,
        keys: Any,
        page_major: Any,
        out: Any,
    ) -> None:
        stripes = len(starts) - 1
        outer, inner = (len(pages), stripes) if page_major else (stripes, len(pages))
        for a in range(outer):
            for b in range(inner):
                row, stripe = (a, b) if page_major else (b, a)
                total = stripe_sum(
                    pages[row],
                    starts[stripe],
                    starts[stripe + 1],
                    address,
                    stride,
                    words,
                    tail,
                    key,
                    gather,
                    offsets,
                    keys,
                )
                out[row, stripe] = splitmix(total ^ lengths[stripe])

    @numba.njit(nogil=True, cache=cache)  # type: ignore[untyped-decorator]
    def verify(
        pages: Any,
        address: Any,
        stride: Any,
        words: Any,
        tail: Any,
        key: Any,
        gather: Any,
        offsets: Any,
        starts: Any,
        lengths: Any,
        keys: Any,
        page_major: Any,
        expected: Any,
        rows: Any,
        where: Any,
        found: Any,
    ) -> Any:
        stripes = len(starts) - 1
        outer, inner = (len(pages), stripes) if page_major else (stripes, len(pages))
        count = 0
        for a in range(outer):
            for b in range(inner):
                row, stripe = (a, b) if page_major else (b, a)
                page = pages[row]
                total = stripe_sum(
                    page, starts[stripe], starts[stripe + 1], address, stride, words, tail, key, gather, offsets, keys
                )
                value = splitmix(total ^ lengths[stripe])
                if value != expected[page, stripe]:
                    if count < len(rows):
                        rows[count] = row
                        where[count] = stripe
                        found[count] = value
                    count += 1
        return count

    @numba.njit(cache=cache)  # type: ignore[untyped-decorator]
    def exchange(generation: Any, page: Any, expected_generation: Any, address: Any, old: Any, new: Any) -> Any:
        # Keeps the GIL (no nogil): see `exchange_byte`.
        if generation[page] != expected_generation:
            return -1
        byte = numba.carray(byte_pointer(address), (1,), dtype=np.uint8)
        if old >= 0 and byte[0] != old:
            return -2
        before = byte[0]
        byte[0] = before ^ np.uint8(new)
        return int(before)

    plan = (
        np.zeros(0, np.uint64),
        *(np.zeros(0, np.int64),) * 5,
        np.zeros(1, np.int64),
        np.zeros(1, np.int64),
        np.zeros(0, np.uint64),
        np.zeros(1, np.uint64),
        True,
    )
    pages, i64, u64 = np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros((1, 1), np.uint64)
    read(pages, *plan, u64)
    verify(pages, *plan, u64, i64, i64.copy(), np.zeros(1, np.uint64))
    scratch = np.zeros(1, np.uint8)
    exchange(i64, 0, 0, np.uint64(scratch.ctypes.data), -1, 0)
    return read, verify, exchange


def exchange_byte(
    generation: PageArray, page: int, expected_generation: int, address: int, mask: int, *, old: int = -1
) -> int:
    """Xors one byte of CPU memory with `mask`, if the page's generation still is the expected one (and the byte is
    `old`).

    Returns the byte before, -1 when the generation moved on, -2 when the byte is not `old`.

    The check and the write are one call that keeps the GIL. The engine's thread raises the generation while it holds
    the GIL, before it launches a write, so either we see the new generation, or our write is done before the engine's
    begins.
    """
    return int(compiled_kernels()[2](generation, page, expected_generation, np.uint64(address), old, mask))


class CpuTable:
    """`FingerprintTable` for pools in CPU memory."""

    backend = "cpu"

    def __init__(self, group: CanaryGroup, *, threads: int = 1) -> None:
        if group.device.type != "cpu":
            raise GeometryError(f"group {group.name} lies on {group.device}, not in CPU memory")
        self._read, self._verify, _ = compiled_kernels()
        self._group = group  # keeps the tensors alive
        self._plan = Plan(group)
        self._expected = np.zeros((group.pages, len(group.stripes)), np.uint64)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kv-canary-cpu") if threads > 1 else None

    def read(self, pages: PageArray) -> FingerprintArray:
        out = np.empty((len(pages), len(self._group.stripes)), np.uint64)
        pages = np.ascontiguousarray(pages)
        if self._pool is None or len(pages) < self._threads:
            self._read(pages, *self._plan.arguments, out)
        else:
            parts = zip(np.array_split(pages, self._threads), np.array_split(out, self._threads), strict=True)
            for future in [self._pool.submit(self._read, part, *self._plan.arguments, rows) for part, rows in parts]:
                future.result()
        return out

    def verify(self, pages: PageArray) -> Differences:
        pages = np.ascontiguousarray(pages)
        if self._pool is None or len(pages) < self._threads:
            return self._verify_part(pages, 0)
        parts = np.array_split(pages, self._threads)
        starts = np.cumsum([0] + [len(part) for part in parts[:-1]])
        futures = [
            self._pool.submit(self._verify_part, part, int(start)) for part, start in zip(parts, starts, strict=True)
        ]
        found = [future.result() for future in futures]
        return Differences(
            rows=np.concatenate([part.rows for part in found]),
            stripes=np.concatenate([part.stripes for part in found]),
            found=np.concatenate([part.found for part in found]),
        )

    def _verify_part(self, pages: PageArray, start: int) -> Differences:
        size = min(_MAXIMUM_DIFFERENCES, max(1, len(pages) * len(self._group.stripes)))
        rows, where, found = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.uint64)
        count = min(size, self._verify(pages, *self._plan.arguments, self._expected, rows, where, found))
        return Differences(rows=rows[:count] + start, stripes=where[:count], found=found[:count])

    def expected(self, pages: PageArray) -> FingerprintArray:
        return self._expected[pages]

    def store(self, pages: PageArray, fingerprints: FingerprintArray) -> None:
        self._expected[pages] = fingerprints

    def find(self, stripe: int, fingerprint: int) -> PageArray:
        return np.flatnonzero(self._expected[:, stripe] == np.uint64(fingerprint))
