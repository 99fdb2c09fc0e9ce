"""CPU backend: fingerprints of pages in CPU memory, read in address order without the GIL. For the canary thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_canary.errors import GeometryError
from kv_canary.fingerprint import spec
from kv_canary.fingerprint.kernels import compiled_kernels
from kv_canary.fingerprint.table import Differences, FingerprintArray, PageArray
from kv_canary.fingerprint.tensor import words_of
from kv_canary.geometry import WORD, CanaryGroup, PageBuffer
from kv_canary.identity import splitmix64_scalar
from kv_canary.ledger.columns import PageColumns

TILE_BYTES = 64 << 10  # of one segment: what is read in a row before the next tensor's turn
MAXIMUM_TILE = 64  # pages
_MAXIMUM_DIFFERENCES = 4096  # rows kept of one launch; a page that does not fit is found by the next sweep


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
        self.segments = np.array(rows, np.int64).reshape(-1, 6)
        self.offsets = np.concatenate(offsets) if offsets else np.zeros(1, np.int64)
        self.starts = np.array(starts, np.int64)
        self.lengths = np.array([splitmix64_scalar(stripe.bytes_per_page) for stripe in group.stripes], np.uint64)
        self.keys = spec.keys(max((stripe.words for stripe in group.stripes), default=1))
        # A page whose segments all lie inside it is read as a whole, page after page; of tensors of their own first the
        # bytes of a whole tile, then those of the next tensor: either way addresses rise for as long as can be.
        addresses = self.segments[:, 0]
        self.page_major = len(rows) == 0 or bool(
            np.ptp(addresses) < min(buffer.page_stride for buffer in group.buffers)
        )
        run_bytes = TILE_BYTES if self.page_major else int(self.segments[:, 2].mean()) * WORD
        self.tile = max(2, min(MAXIMUM_TILE, TILE_BYTES // max(1, run_bytes)) // 2 * 2)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.segments, self.offsets, self.starts, self.lengths, self.keys, self.page_major, self.tile


def _is_word_aligned(buffer: PageBuffer) -> bool:
    single = not buffer.axes
    logical = single or (buffer.run_bytes % WORD == 0 and all(axis.logical_stride % WORD == 0 for axis in buffer.axes))
    memory = (buffer.address | buffer.page_stride) % WORD == 0 and all(
        axis.memory_stride % WORD == 0 for axis in buffer.axes
    )
    return logical and memory


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


def _as_compiled(pages: PageArray) -> PageArray:
    """In the form that the kernels were compiled for; another one would be compiled while the engine serves."""
    return np.require(pages, np.int64, ["C_CONTIGUOUS", "WRITEABLE"])


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
        pages = _as_compiled(pages)
        if self._pool is None or len(pages) < self._threads:
            self._read(pages, *self._plan.arguments, out)
        else:
            parts = zip(np.array_split(pages, self._threads), np.array_split(out, self._threads), strict=True)
            for future in [self._pool.submit(self._read, part, *self._plan.arguments, rows) for part, rows in parts]:
                future.result()
        return out

    def verify(self, pages: PageArray) -> Differences:
        pages = _as_compiled(pages)
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

    def words(self, page: int, stripe: int) -> FingerprintArray:
        return words_of(self._group.stripes[stripe], page)

    def synchronize(self) -> None:
        """Nothing runs behind a call."""

    def find(self, stripe: int, fingerprint: int) -> PageArray:
        return np.flatnonzero(self._expected[:, stripe] == np.uint64(fingerprint))

    def ranges(self, columns: PageColumns | None) -> None:
        return None
