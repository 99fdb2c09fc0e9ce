"""Presets: pools of well-known models, laid out as their engines lay them out, over one piece of memory.

Values, and the way from a preset and a piece of memory to a canary group. Nothing here reads a byte.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kv_canary.errors import KVCanaryError
from kv_canary.geometry import WORD, CanaryGroup, build_group, contiguous_buffer
from kv_canary.snapshot import GroupKind

ALIGNMENT = 256  # bytes; what device allocators give

_ROWS = re.compile(r"rows-([0-9]{1,6})")
ROW_SWEEP = ("rows-128", "rows-512", "rows-2048", "rows-8192", "rows-32768")
"""Presets for the plot of bandwidth by row size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """One tensor of a layer. A page holds, for each of `rows` (name, bytes a token), the rows of all its tokens one
    after the other; `page_bytes` is the distance from page to page.
    """

    part: str
    rows: tuple[tuple[str, int], ...]
    page_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A pool's geometry: `layers` times `tensors`, pages of `page_tokens` tokens."""

    name: str
    description: str
    kind: GroupKind
    layers: int
    page_tokens: int
    tensors: tuple[TensorLayout, ...]

    @property
    def memory_bytes_per_page(self) -> int:
        """Bytes of memory that a page takes in all tensors together, padding included."""
        return self.layers * sum(tensor.page_bytes for tensor in self.tensors)

    @property
    def run_bytes(self) -> int:
        """The longest contiguous piece of a page."""
        return self.page_tokens * max(size for tensor in self.tensors for _, size in tensor.rows)

    @property
    def minimum_bytes(self) -> int:
        """Memory for a pool of one page."""
        return self.memory_bytes_per_page + self.layers * len(self.tensors) * ALIGNMENT

    def pages_in(self, size_bytes: int) -> int:
        """Pages of a pool that fits into `size_bytes`; raises `KVCanaryError` when not even one does."""
        if size_bytes < self.minimum_bytes:
            raise KVCanaryError(
                f"--size: {size_bytes:,} bytes hold no page of {self.name}; give at least {self.minimum_bytes:,} bytes"
            )
        return (size_bytes - self.layers * len(self.tensors) * ALIGNMENT) // self.memory_bytes_per_page

    def build(self, memory: torch.Tensor) -> CanaryGroup:
        """A canary group over `memory` (uint8, one dimension): a tensor for each layer and part, one after the other.

        Raises `KVCanaryError` when no page fits.
        """
        pages = self.pages_in(memory.numel())
        buffers = []
        start = -memory.storage_offset() % ALIGNMENT
        for layer in range(self.layers):
            for layout in self.tensors:
                tensor = memory[start : start + pages * layout.page_bytes]
                offset = int(tensor.storage_offset())
                for name, row_bytes in layout.rows:
                    buffers.append(
                        contiguous_buffer(
                            ".".join(filter(None, (f"layer.{layer}", layout.part, name))),
                            layer,
                            tensor,
                            offset=offset,
                            pages=pages,
                            page_stride=layout.page_bytes,
                            rows=self.page_tokens,
                            row_bytes=row_bytes,
                        )
                    )
                    offset += self.page_tokens * row_bytes
                start += -(-pages * layout.page_bytes // ALIGNMENT) * ALIGNMENT
        return build_group(self.name, self.kind, buffers, coverage="all", page_tokens=self.page_tokens)


def _keys_and_values(row_bytes: int, page_tokens: int) -> tuple[TensorLayout, ...]:
    return tuple(
        TensorLayout(part=part, rows=(("", row_bytes),), page_bytes=page_tokens * row_bytes) for part in ("k", "v")
    )


def _one_tensor(row_bytes: int, page_tokens: int) -> tuple[TensorLayout, ...]:
    return (TensorLayout(part="", rows=(("", row_bytes),), page_bytes=page_tokens * row_bytes),)


BF16 = 2  # bytes

PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="llama-8b",
            description="32 layers, K and V, 8 KV heads x 128, bf16, pages of 16 tokens",
            kind="full",
            layers=32,
            page_tokens=16,
            tensors=_keys_and_values(8 * 128 * BF16, 16),
        ),
        Preset(
            name="llama-70b-tp8",
            description="80 layers, K and V, 1 KV head x 128 a rank, bf16, pages of 16 tokens",
            kind="full",
            layers=80,
            page_tokens=16,
            tensors=_keys_and_values(1 * 128 * BF16, 16),
        ),
        Preset(
            name="deepseek-mla",
            description="61 layers, 576 x bf16 a token, pages of 64 tokens",
            kind="mla",
            layers=61,
            page_tokens=64,
            tensors=_one_tensor(576 * BF16, 64),
        ),
        Preset(
            name="dsv4",
            description="8 layers, pages of 37,440 bytes: 64 rows of 576 bytes, 64 scales of 8 bytes, padding",
            kind="mla",
            layers=8,
            page_tokens=64,
            tensors=(TensorLayout(part="", rows=(("data", 576), ("scales", 8)), page_bytes=65 * 576),),
        ),
        Preset(
            name="token-granular",
            description="the rows of llama-8b, pages of 1 token",
            kind="full",
            layers=32,
            page_tokens=1,
            tensors=_keys_and_values(8 * 128 * BF16, 1),
        ),
    )
}


def find_preset(name: str) -> Preset:
    """A preset by name; `rows-N` is a pool of 32 layers whose pages are one row of N bytes.

    Raises `KVCanaryError` that lists the choices.
    """
    if name in PRESETS:
        return PRESETS[name]
    match = _ROWS.fullmatch(name)
    if match and int(match[1]) > 0:
        row_bytes = int(match[1])
        return Preset(
            name=name,
            description=f"32 layers, pages of one row of {row_bytes:,} bytes",
            kind="full",
            layers=32,
            page_tokens=1,
            tensors=_one_tensor(row_bytes, 1),
        )
    close = difflib.get_close_matches(name, PRESETS, 1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise KVCanaryError(
        f"there is no preset {name!r}\n{hint}presets: {', '.join(PRESETS)}, or rows-N for rows of N bytes"
    )


def words_per_page(group: CanaryGroup) -> int:
    """64-bit words that are read for one page."""
    return sum(stripe.words for stripe in group.stripes)


def page_pieces(group: CanaryGroup, pages: Sequence[int]) -> list[tuple[int, int]]:
    """(address, bytes) of every contiguous piece of `pages`, tensor after tensor: for peers that hash pieces."""
    return [
        (buffer.address + page * buffer.page_stride, buffer.run_bytes) for buffer in group.buffers for page in pages
    ]


__all__ = ["PRESETS", "ROW_SWEEP", "WORD", "Preset", "TensorLayout", "find_preset", "page_pieces", "words_per_page"]
