"""Pools of one latent row a token: MLA, and DSA with the keys of its indexer."""

from __future__ import annotations

from typing import Any

import torch

from kv_canary.geometry import PageBuffer
from kv_canary.settings import Settings
from kv_canary.snapshot import UncoveredBuffer
from kv_canary_sglang.pools.buffers import buffer_name, paged_buffer
from kv_canary_sglang.pools.sections import Groups, section
from kv_canary_sglang.pools.spaces import SINK_PAGES, PageSpace, layer_ids, page_space

TAIL = "a ring of a request's newest tokens: it is rewritten with every token"


def attach_latent(
    pool: Any, *, settings: Settings, device: torch.device, kv_token_id_vs_position_offset: int
) -> Groups:
    """One group, `mla`: latent rows and, at four bits, their scales."""
    space = page_space(pool)
    return section(
        "mla", "mla", space, latent_buffers(pool, space), settings=settings, offset=kv_token_id_vs_position_offset
    )


def attach_sparse_latent(
    pool: Any, *, settings: Settings, device: torch.device, kv_token_id_vs_position_offset: int
) -> Groups:
    """`mla`, and `indexer`: the keys by which DSA chooses tokens. Both are written with the token."""
    main = attach_latent(
        pool, settings=settings, device=device, kv_token_id_vs_position_offset=kv_token_id_vs_position_offset
    )
    return (*main, *indexer_groups(pool, settings=settings, offset=kv_token_id_vs_position_offset))


def latent_buffers(pool: Any, space: PageSpace) -> list[PageBuffer]:
    scales = getattr(pool, "kv_scale_buffer", None)
    buffers = []
    for index, layer in enumerate(layer_ids(pool)):
        parts = [("kv", pool.kv_buffer[index])] + ([("kv_scale", scales[index])] if scales is not None else [])
        buffers += [
            paged_buffer(part, layer, tensor, pages=space.pages, rows=space.page_tokens) for part, tensor in parts
        ]
    return buffers


def indexer_groups(pool: Any, *, settings: Settings, offset: int) -> Groups:
    """The group `indexer` of a DSA pool. Its pages may be more than the pool's: it is as long as the allocator."""
    main = page_space(pool)
    space = PageSpace(
        pages=pool.index_buf_size // main.page_tokens + SINK_PAGES, page_tokens=main.page_tokens, refusal=main.refusal
    )
    # A row of the tensor is one page: key bytes of all (pooled) tokens, then their scales, in pieces that the kernels
    # read as pages of their own.
    pieces = main.page_tokens // pool.index_kpool // pool.index_page_size
    buffers: list[PageBuffer] = []
    for layer, tensor in zip(layer_ids(pool), pool.index_k_with_scale_buffer, strict=True):
        if not tensor.shape[0]:
            continue  # the layer takes the choice of the one before it and keeps no keys
        rows = tensor.view(tensor.shape[0] * pieces, -1)
        keys = pool.index_page_size * pool.index_head_dim
        scale = (rows.shape[1] - keys) // pool.index_page_size
        buffers += [
            paged_buffer(
                "index_k", layer, rows[:, :keys], pages=space.pages, rows=pieces, row_bytes=pool.index_head_dim
            ),
            paged_buffer("index_k_scale", layer, rows[:, keys:], pages=space.pages, rows=pieces, row_bytes=scale),
        ]
    uncovered = [
        UncoveredBuffer(name=buffer_name(layer, part), reason=TAIL)
        for part, attribute in (("index_tail_k", "_compress_tail_k"), ("index_tail_score", "_compress_tail_score"))
        for layer, tensor in zip(layer_ids(pool), getattr(pool, attribute, None) or (), strict=False)
        if tensor.shape[0]
    ]
    return section("indexer", "indexer", space, buffers, settings=settings, offset=offset, uncovered=uncovered)
