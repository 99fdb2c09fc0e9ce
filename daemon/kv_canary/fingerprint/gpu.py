"""GPU backend: the table beside the pool, read by one Triton kernel on a stream of the lowest priority.

Used by the canary thread, which waits for its own stream alone. Everything that a launch needs is allocated and
compiled when the table is opened, before traffic: a launch allocates nothing and compiles nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from kv_canary.fingerprint import spec
from kv_canary.fingerprint.gpu_kernels import BUFFER_COLUMNS, BYTES, CONTIGUOUS, WORDS, fingerprint_kernel
from kv_canary.fingerprint.table import Differences, FingerprintArray, PageArray
from kv_canary.geometry import WORD, CanaryGroup, PageBuffer
from kv_canary.identity import splitmix64_scalar

TILE_PAGES = 4
BLOCK_WORDS = 256
WARPS = 4
LAUNCH_ROWS = 4096  # pages of one launch at most
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
        self._stream = _lowest_stream(self._device)
        self._plan = self._make_plan()
        self._rows = min(LAUNCH_ROWS, group.pages)
        with self._on_stream():
            self._expected = torch.zeros((group.pages, self._stripes), dtype=torch.int64, device=self._device)
            self._pages = torch.zeros(self._rows, dtype=torch.int64, device=self._device)
            self._result = torch.zeros(
                max(self._rows * self._stripes, MAXIMUM_DIFFERENCES), dtype=torch.int64, device=self._device
            )
            self._count = torch.zeros(1, dtype=torch.int32, device=self._device)
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
                count = min(int(self._count.cpu()), MAXIMUM_DIFFERENCES)
                if count:
                    where = self._where[:, :count].cpu().numpy().astype(np.int64)
                    # a copy: the next launch writes into the same place
                    found = self._result[:count].to("cpu", copy=True).numpy().view(np.uint64)
                    parts.append((where[0] + start, where[1], found))
        if not parts:
            nothing = np.empty(0, np.int64)
            return Differences(rows=nothing, stripes=nothing, found=np.empty(0, np.uint64))
        rows, stripes, found = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Differences(rows=rows, stripes=stripes, found=found)

    def expected(self, pages: PageArray) -> FingerprintArray:
        with torch.inference_mode(), self._on_stream():
            rows = self._expected[torch.from_numpy(pages.copy()).to(self._device)]
            fingerprints: FingerprintArray = rows.cpu().numpy().view(np.uint64)
        return fingerprints

    def store(self, pages: PageArray, fingerprints: FingerprintArray) -> None:
        with torch.inference_mode(), self._on_stream():
            rows = torch.from_numpy(fingerprints.astype(np.uint64, copy=True).view(np.int64)).to(self._device)
            self._expected[torch.from_numpy(pages.copy()).to(self._device)] = rows

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def find(self, stripe: int, fingerprint: int) -> PageArray:
        signed = int(np.array(fingerprint, np.uint64).view(np.int64))
        with torch.inference_mode(), self._on_stream():
            pages: PageArray = (self._expected[:, stripe] == signed).nonzero().flatten().cpu().numpy()
        return pages

    def _launch(self, pages: PageArray, *, verify: bool) -> int:
        count = len(pages)
        self._pages[:count].copy_(torch.from_numpy(pages.copy()))
        buffers, offsets, starts, lengths, keys = self._plan
        kernel: Any = fingerprint_kernel
        kernel[(-(-count // TILE_PAGES), self._stripes)](
            self._pages,
            count,
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
            MODE=self._mode,
            ALIGNMENT=self._alignment,
            KEY_ALIGNMENT=self._key_alignment,
            TILE=TILE_PAGES,
            BLOCK=BLOCK_WORDS,
            num_warps=WARPS,
        )
        return count

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


def _offsets(buffer: PageBuffer, *, by_word: bool) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Memory offset in the page of every word, or of every byte, in logical order."""
    step = WORD if by_word else 1
    offsets = np.empty(buffer.bytes_per_page // step, np.int64)
    for memory, logical in spec.run_offsets(buffer):
        run = np.arange(memory, memory + buffer.run_bytes, step)
        offsets[logical // step : logical // step + len(run)] = run
    return offsets


def _lowest_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    make_stream: Any = torch.cuda.Stream
    stream: torch.cuda.Stream = make_stream(device, priority=0)  # 0 is the lowest that there is
    return stream
