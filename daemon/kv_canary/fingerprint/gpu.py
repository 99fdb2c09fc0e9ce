"""GPU backend: the table beside the pool, read by one Triton kernel on a stream of the lowest priority.

Used by the canary thread, which waits for its own stream alone. Everything that a launch needs is allocated and
compiled when the table, or its ranges, are opened, before traffic: a launch of `verify` allocates nothing on the device
and compiles nothing.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from kv_canary.fingerprint import spec
from kv_canary.fingerprint.gpu_kernels import (
    BUFFER_COLUMNS,
    BYTES,
    CONTIGUOUS,
    WORDS,
    fingerprint_kernel,
    settle_kernel,
)
from kv_canary.fingerprint.table import NEVER, Differences, FingerprintArray, PageArray, PageRanges, RangeOutcome
from kv_canary.fingerprint.tensor import words_of
from kv_canary.geometry import WORD, CanaryGroup, PageBuffer
from kv_canary.identity import splitmix64_scalar
from kv_canary.ledger.columns import PageColumns
from kv_canary.streams import lowest_stream, on_stream

logger = logging.getLogger("kv_canary")

TILE_PAGES = 4
BLOCK_WORDS = 256
WARPS = 4
LAUNCH_ROWS = 4096  # pages of one launch at most
RANGE_ROWS = 16_384  # pages of one launch over a range at most
SETTLE_BLOCK = 256
MAXIMUM_DIFFERENCES = 4096  # kept of one launch; a page that does not fit is found by the next sweep


def mode_of(buffers: tuple[PageBuffer, ...]) -> int:
    """The plainest way in which all of these buffers can be read."""
    if any(buffer.bytes_per_page % WORD for buffer in buffers):
        return BYTES
    if any((buffer.address | buffer.page_stride) % WORD for buffer in buffers):
        return BYTES
    strides = [part for b in buffers for axis in b.axes for part in (axis.memory_stride, axis.logical_stride)]
    if any(part % WORD for part in strides) or any(buffer.axes and buffer.run_bytes % WORD for buffer in buffers):
        return BYTES
    return WORDS if any(buffer.axes for buffer in buffers) else CONTIGUOUS


class GpuTable:
    """`FingerprintTable` for pools in GPU memory (and, under Triton's interpreter, for any tensor)."""

    backend = "gpu"

    def __init__(self, group: CanaryGroup) -> None:
        self._group = group  # keeps the tensors alive
        self._device = group.device
        self._stripes = len(group.stripes)
        self._mode = mode_of(group.buffers)
        self._alignment = 16 if all((b.address | b.page_stride) % 16 == 0 for b in group.buffers) else WORD
        keys = [buffer.words for stripe in group.stripes for buffer in stripe.buffers[:-1]]
        self._key_alignment = WORD if any(words % 2 for words in keys) else 16
        self._stream = lowest_stream(self._device)
        self._plan = self._make_plan()
        self._rows = min(LAUNCH_ROWS, group.pages)
        with self._on_stream():
            self._expected = torch.zeros((group.pages, self._stripes), dtype=torch.int64, device=self._device)
            self._pages = torch.zeros(self._rows, dtype=torch.int64, device=self._device)
            self._result = torch.zeros(
                max(self._rows * self._stripes, MAXIMUM_DIFFERENCES), dtype=torch.int64, device=self._device
            )
            self._count = torch.zeros(2, dtype=torch.int32, device=self._device)  # differences; pages of a range read
            self._where = torch.zeros((2, MAXIMUM_DIFFERENCES), dtype=torch.int32, device=self._device)
        first = np.array([group.first_page], np.int64)
        self.store(first, self.read(first))  # compiles both kernels
        self.verify(first)

    def _make_plan(self) -> tuple[torch.Tensor, ...]:
        columns: list[list[int]] = []
        offsets: list[np.ndarray[Any, np.dtype[np.int64]]] = [np.zeros(1, np.int64)]
        starts, offset_count = [0], 1
        for stripe in self._group.stripes:
            key = 0
            for buffer in stripe.buffers:
                columns.append([buffer.address, buffer.page_stride, buffer.bytes_per_page, key, offset_count])
                if self._mode != CONTIGUOUS:
                    offsets.append(_offsets(buffer, by_word=self._mode == WORDS))
                    offset_count += len(offsets[-1])
                key += buffer.words
            starts.append(len(columns))
        lengths = [splitmix64_scalar(stripe.bytes_per_page) for stripe in self._group.stripes]
        host = (
            np.array(columns, np.int64).reshape(-1, BUFFER_COLUMNS),
            np.concatenate(offsets),
            np.array(starts, np.int32),
            np.array(lengths, np.uint64).view(np.int64),
            spec.keys(max((stripe.words for stripe in self._group.stripes), default=1)).view(np.int64),
        )
        return tuple(torch.from_numpy(array.copy()).to(self._device) for array in host)

    def read(self, pages: PageArray) -> FingerprintArray:
        out = np.empty((len(pages), self._stripes), np.uint64)
        with torch.inference_mode(), self._on_stream():
            for start in range(0, len(pages), self._rows):
                count = self._launch(pages[start : start + self._rows], verify=False)
                found = self._result[: count * self._stripes].cpu().numpy().view(np.uint64)
                out[start : start + count] = found.reshape(count, self._stripes)
        return out

    def verify(self, pages: PageArray) -> Differences:
        parts = []
        with torch.inference_mode(), self._on_stream():
            for start in range(0, len(pages), self._rows):
                self._count.zero_()
                self._launch(pages[start : start + self._rows], verify=True)
                if count := int(self._count[0]):
                    parts.append((self._differences(count), start))
        return _joined(parts)

    def _differences(self, count: int) -> Differences:
        """The first `count` differences of the last launch, as far as they were kept."""
        count = min(count, MAXIMUM_DIFFERENCES)
        where = self._where[:, :count].cpu().numpy().astype(np.int64)
        # a copy: the next launch writes into the same place
        found = self._result[:count].to("cpu", copy=True).numpy().view(np.uint64)
        return Differences(rows=where[0], stripes=where[1], found=found)

    def expected(self, pages: PageArray) -> FingerprintArray:
        with torch.inference_mode(), self._on_stream():
            rows = self._expected[torch.from_numpy(pages.copy()).to(self._device)]
            fingerprints: FingerprintArray = rows.cpu().numpy().view(np.uint64)
        return fingerprints

    def store(self, pages: PageArray, fingerprints: FingerprintArray) -> None:
        with torch.inference_mode(), self._on_stream():
            rows = torch.from_numpy(fingerprints.astype(np.uint64, copy=True).view(np.int64)).to(self._device)
            self._expected[torch.from_numpy(pages.copy()).to(self._device)] = rows

    def words(self, page: int, stripe: int) -> FingerprintArray:
        with torch.inference_mode(), self._on_stream():
            return words_of(self._group.stripes[stripe], page)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def find(self, stripe: int, fingerprint: int) -> PageArray:
        signed = int(np.array(fingerprint, np.uint64).view(np.int64))
        with torch.inference_mode(), self._on_stream():
            pages: PageArray = (self._expected[:, stripe] == signed).nonzero().flatten().cpu().numpy()
        return pages

    def ranges(self, columns: PageColumns | None) -> PageRanges | None:
        """Compiles, so to be called when a pool is attached. None as well if the kernels do not compile."""
        if columns is None or columns.device != self._expected.device or not self._stripes:
            return None
        try:
            return GpuRanges(self, columns)
        except Exception as error:  # noqa: BLE001 - pages picked on the host are verified as well
            logger.warning("group %s: the device cannot pick its pages itself: %s", self._group.name, error)
            return None

    def _launch(self, pages: PageArray, *, verify: bool) -> int:
        count = len(pages)
        self._pages[:count].copy_(torch.from_numpy(pages.copy()))
        self._run(count, verify=verify)
        return count

    def _run(
        self,
        count: int,
        *,
        verify: bool,
        first: int = 0,
        columns: PageColumns | None = None,
        baseline: torch.Tensor | None = None,
    ) -> None:
        buffers, offsets, starts, lengths, keys = self._plan
        kernel: Any = fingerprint_kernel
        kernel[(-(-count // TILE_PAGES), self._stripes)](
            self._pages,
            count,
            first,
            None if columns is None else columns.state,
            None if columns is None else columns.generation,
            baseline,
            buffers,
            offsets,
            starts,
            lengths,
            keys,
            self._stripes,
            self._expected,
            self._result,
            self._count,
            self._where[0],
            self._where[1],
            MAXIMUM_DIFFERENCES,
            VERIFY=verify,
            RANGE=columns is not None,
            MODE=self._mode,
            ALIGNMENT=self._alignment,
            KEY_ALIGNMENT=self._key_alignment,
            TILE=TILE_PAGES,
            BLOCK=BLOCK_WORDS,
            num_warps=WARPS,
        )

    def _on_stream(self) -> AbstractContextManager[object]:
        return on_stream(self._stream)


class GpuRanges:
    """`PageRanges` of a `GpuTable` and a ledger's columns on the same device.

    Why it keeps the confirm protocol. Three pieces of work are queued on the table's stream, each beginning when the
    one before has ended:

    1. the reading: it takes a page if its baseline is the live generation g, and reads the bytes;
    2. the settling: `stands` says of which pages the baseline is the live generation still;
    3. the copies to the host.

    The engine raises a generation on its own stream, in front of the write. If the reading saw one byte of a write, the
    write had begun, so the raise had ended, and the settling, which begins after the reading ended, sees it, whatever
    the two streams do otherwise. So a page that stands was read while no legitimate writer existed.

    A page that stands was read, by every program: generations only go up, and the baseline does not change during a
    launch, so if the two are equal at the end, they were equal throughout; and a page with its baseline live is sealed
    or free, and leaves these states only by a raise. What was read and does not stand has moved on: superseded.

    The settling takes the place of a mask that the reading would have to write: it reads 17 bytes a page, and the host
    gets one byte a page together with the number of differences, for which it waits anyhow.
    """

    def __init__(self, table: GpuTable, columns: PageColumns) -> None:
        self._table = table
        self._columns = columns
        rows = min(RANGE_ROWS, len(columns.generation))
        with torch.inference_mode(), table._on_stream():
            self._baseline = torch.full_like(columns.generation, NEVER)
            self._stands = torch.zeros(rows, dtype=torch.uint8, device=columns.device)
        self.verify(0, 1)  # compiles both kernels; nothing has a baseline, so nothing is read

    @property
    def nbytes(self) -> int:
        return self._baseline.nbytes

    def keep(self, pages: PageArray, generations: PageArray) -> None:
        both = torch.from_numpy(np.stack([pages, generations]))
        with torch.inference_mode(), self._table._on_stream():
            both = both.to(self._baseline.device)
            self._baseline[both[0]] = both[1]

    def forget(self) -> None:
        with torch.inference_mode(), self._table._on_stream():
            self._baseline.fill_(NEVER)

    def verify(self, first: int, stop: int) -> RangeOutcome:
        parts = [
            self._verify(start, min(start + len(self._stands), stop)) for start in range(first, stop, len(self._stands))
        ]
        if len(parts) == 1:
            return parts[0]
        starts = range(0, stop - first, len(self._stands))
        return RangeOutcome(
            read_pages=sum(part.read_pages for part in parts),
            stands=np.concatenate([np.zeros(0, np.bool_), *(part.stands for part in parts)]),
            differences=_joined([(part.differences, start) for part, start in zip(parts, starts, strict=True)]),
            complete=all(part.complete for part in parts),
        )

    def _verify(self, first: int, stop: int) -> RangeOutcome:
        table, columns, rows = self._table, self._columns, stop - first
        with torch.inference_mode(), table._on_stream():
            table._count.zero_()
            table._run(rows, verify=True, first=first, columns=columns, baseline=self._baseline)
            kernel: Any = settle_kernel
            kernel[(-(-rows // SETTLE_BLOCK),)](
                first,
                rows,
                columns.state,
                columns.generation,
                self._baseline,
                self._stands,
                BLOCK=SETTLE_BLOCK,
                num_warps=WARPS,
            )
            count, read_pages = table._count.tolist()
            stands = self._stands[:rows].to("cpu", copy=True).numpy().view(np.bool_)
            differences = table._differences(count) if count else _no_differences()
        return RangeOutcome(
            read_pages=read_pages, stands=stands, differences=differences, complete=count <= MAXIMUM_DIFFERENCES
        )


def _no_differences() -> Differences:
    nothing = np.empty(0, np.int64)
    return Differences(rows=nothing, stripes=nothing, found=np.empty(0, np.uint64))


def _joined(parts: list[tuple[Differences, int]]) -> Differences:
    """Differences of several launches, each with the row that it began with."""
    if not parts:
        return _no_differences()
    return Differences(
        rows=np.concatenate([part.rows + start for part, start in parts]),
        stripes=np.concatenate([part.stripes for part, _ in parts]),
        found=np.concatenate([part.found for part, _ in parts]),
    )


def _offsets(buffer: PageBuffer, *, by_word: bool) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Memory offset in the page of every word, or of every byte, in logical order."""
    step = WORD if by_word else 1
    offsets = np.empty(buffer.bytes_per_page // step, np.int64)
    for memory, logical in spec.run_offsets(buffer):
        run = np.arange(memory, memory + buffer.run_bytes, step)
        offsets[logical // step : logical // step + len(run)] = run
    return offsets
