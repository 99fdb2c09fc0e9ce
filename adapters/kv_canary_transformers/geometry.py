"""Where the KV of a transformers cache allocator lies.

One block is a page: for each layer of the allocator's attention type the keys of `tokens_per_page` tokens, then their
values, all contiguous in one uint8 tensor. The blocks of the first two sectors take the padding's writes and are never
guarded.
"""

from __future__ import annotations

from typing import Any

import torch

from kv_canary.geometry import CanaryGroup, build_group, contiguous_buffer
from kv_canary.registry import register_pool_attacher
from kv_canary.settings import Settings
from kv_canary.snapshot import GroupKind, UncoveredBuffer

_PACKAGE = "transformers.generation.continuous_batching.cache_allocators"
_TRASH_SECTORS = 2

SLIDING_REASON = (
    "blocks of sliding-window layers are rewritten in place while a request runs: they are checked for ownership, and "
    "for their bytes only while they are free"
)


def attach_full(
    pool: Any, *, settings: Settings, device: torch.device, kv_token_id_vs_position_offset: int
) -> tuple[CanaryGroup, ...]:
    """The group of a `FullAttentionCacheAllocator`."""
    return (_group(pool, "full", settings, kv_token_id_vs_position_offset, ()),)


def attach_sliding(
    pool: Any, *, settings: Settings, device: torch.device, kv_token_id_vs_position_offset: int
) -> tuple[CanaryGroup, ...]:
    """The group of a `SlidingAttentionCacheAllocator`."""
    uncovered = (UncoveredBuffer(name="sliding: blocks in use", reason=SLIDING_REASON),)
    return (_group(pool, "swa", settings, kv_token_id_vs_position_offset, uncovered),)


def _group(
    allocator: Any, kind: GroupKind, settings: Settings, offset: int, uncovered: tuple[UncoveredBuffer, ...]
) -> CanaryGroup:
    blocks = allocator._copy_view
    half = allocator.bytes_per_page // 2
    rows = allocator.tokens_per_page
    buffers = [
        contiguous_buffer(
            f"layer.{layer}.{part}",
            layer,
            blocks,
            offset=index * allocator.bytes_per_page + start,
            pages=blocks.shape[0],
            page_stride=allocator.bytes_per_block,
            rows=rows,
            row_bytes=half // rows,
            dtype=getattr(allocator, "cache_dtype", None),
        )
        for index, layer in enumerate(allocator.layer_indices)
        for part, start in (("k", 0), ("v", half))
    ]
    return build_group(
        "sliding" if kind == "swa" else kind,
        kind,
        buffers,
        coverage=settings.coverage,
        first_page=_TRASH_SECTORS * allocator.blocks_per_sector,
        page_tokens=rows,
        uncovered=uncovered,
        kv_token_id_vs_position_offset=offset,
    )


def register() -> None:
    """Puts both allocators into the pool registry."""
    register_pool_attacher(f"{_PACKAGE}.full_attention.FullAttentionCacheAllocator", attach_full)
    register_pool_attacher(f"{_PACKAGE}.sliding_attention.SlidingAttentionCacheAllocator", attach_sliding)
