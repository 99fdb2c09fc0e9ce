"""Any-device backend in plain torch operations: a slow reference that runs wherever torch does.

It is what a CUDA pool is read with until a kernel of its own exists, and what the conformance suite holds against the
definition on a device. It reads on a stream of its own and copies a chunk of pages before it sums them, so it needs
`CHUNK_BYTES` of device memory for a moment. Used by the canary thread.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
import torch

from kv_canary.fingerprint import spec
from kv_canary.fingerprint.table import Differences, FingerprintArray, PageArray
from kv_canary.fingerprint.words import logical_shift, signed, splitmix
from kv_canary.geometry import WORD, CanaryGroup, PageBuffer, Stripe
from kv_canary.identity import splitmix64_scalar
from kv_canary.ledger.columns import PageColumns
from kv_canary.streams import lowest_stream, on_stream

CHUNK_BYTES = 4 << 20

_LOW = 0xFFFFFFFF


def _pages_view(buffer: PageBuffer) -> torch.Tensor:
    """uint8 [pages, axes in logical order..., run_bytes], a view of the pool's memory."""
    storage = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.tensor.untyped_storage())
    axes = sorted(buffer.axes, key=lambda axis: -axis.logical_stride)
    return storage.as_strided(
        (buffer.pages, *(axis.count for axis in axes), buffer.run_bytes),
        (buffer.page_stride, *(axis.memory_stride for axis in axes), 1),
        buffer.offset,
    )


def words_of(stripe: Stripe, page: int) -> FingerprintArray:
    """A host copy of the words of one page, on the current stream."""
    parts = []
    for buffer in stripe.buffers:
        raw = _pages_view(buffer)[page].reshape(-1)
        parts.append(torch.nn.functional.pad(raw, (0, -len(raw) % WORD)).cpu().numpy().view(np.uint64))
    return np.concatenate(parts)


class TensorTable:
    """`FingerprintTable` in torch operations."""

    backend = "tensor"

    def __init__(self, group: CanaryGroup) -> None:
        self._group = group
        self._device = group.device
        self._views = [[_pages_view(buffer) for buffer in stripe.buffers] for stripe in group.stripes]
        keys = spec.keys(max((stripe.words for stripe in group.stripes), default=1)).view(np.int64)
        self._keys = torch.from_numpy(keys.copy()).to(self._device)
        self._lengths = [signed(splitmix64_scalar(stripe.bytes_per_page)) for stripe in group.stripes]
        self._expected = np.zeros((group.pages, len(group.stripes)), np.uint64)
        self._stream = lowest_stream(self._device)
        self._rows = max(1, CHUNK_BYTES // max((stripe.words * WORD for stripe in group.stripes), default=1))

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream that pages are read on; fences are waited for there."""
        return self._stream

    def _on_stream(self) -> AbstractContextManager[object]:
        return on_stream(self._stream)

    def read(self, pages: PageArray) -> FingerprintArray:
        out = np.empty((len(pages), len(self._group.stripes)), np.uint64)
        with torch.inference_mode(), self._on_stream():
            for start in range(0, len(pages), self._rows):
                index = torch.from_numpy(np.ascontiguousarray(pages[start : start + self._rows])).to(self._device)
                for stripe in range(len(self._views)):
                    # .cpu() waits for this stream alone, with the GIL released
                    out[start : start + len(index), stripe] = self._stripe(stripe, index).cpu().numpy().view(np.uint64)
        return out

    def _stripe(self, stripe: int, index: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(index), dtype=torch.int64, device=self._device)
        first = 0
        for buffer, view in zip(self._group.stripes[stripe].buffers, self._views[stripe], strict=True):
            raw = view.index_select(0, index).reshape(len(index), -1)
            if raw.shape[1] % WORD:
                raw = torch.nn.functional.pad(raw, (0, -raw.shape[1] % WORD))
            words = raw.view(torch.int64)
            v = words ^ self._keys[first : first + buffer.words]
            terms = (v & _LOW) * logical_shift(v, 32) + ((words << 32) | logical_shift(words, 32))
            total += terms.sum(dim=1)
            first += buffer.words
        return splitmix(total ^ self._lengths[stripe])

    def verify(self, pages: PageArray) -> Differences:
        found = self.read(pages)
        rows, stripes = np.nonzero(found != self._expected[pages])
        return Differences(rows=rows, stripes=stripes, found=found[rows, stripes])

    def expected(self, pages: PageArray) -> FingerprintArray:
        return self._expected[pages]

    def store(self, pages: PageArray, fingerprints: FingerprintArray) -> None:
        self._expected[pages] = fingerprints

    def words(self, page: int, stripe: int) -> FingerprintArray:
        with torch.inference_mode(), self._on_stream():
            return words_of(self._group.stripes[stripe], page)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def find(self, stripe: int, fingerprint: int) -> PageArray:
        return np.flatnonzero(self._expected[:, stripe] == np.uint64(fingerprint))

    def ranges(self, columns: PageColumns | None) -> None:
        return None
