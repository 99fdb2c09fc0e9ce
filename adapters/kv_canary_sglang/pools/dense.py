"""Pools of keys and values by slot: MHA in all its layouts and quantised forms, and MiniMax's packed page rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kv_canary.geometry import PageBuffer
from kv_canary.settings import Settings
from kv_canary.snapshot import UncoveredBuffer
from kv_canary_sglang.pools.buffers import paged_buffer
from kv_canary_sglang.pools.sections import Groups, section
from kv_canary_sglang.pools.spaces import PageSpace, layer_ids, page_space

WORKSPACE = "a workspace that every prefill fills anew"
SCALE_PAGES = "its pages are of another length than the pool's"

_DATA = ("k", "v")
_PAGE_LAYOUTS = ("hnd", "vectorized_5d")


def attach_dense(pool: Any, *, settings: Settings, device: torch.device, kv_token_id_vs_position_offset: int) -> Groups:
    """Keys, values and their scales: one group, `full`."""
    space = page_space(pool)
    scale_rows = 1 if getattr(pool, "mxfp8_sf_interleaved", False) else space.page_tokens
    buffers: list[PageBuffer] = []
    uncovered = [
        UncoveredBuffer(name=name, reason=WORKSPACE)
        for name in ("dq_k_buffer", "dq_v_buffer", "hicache_write_back_staging")
        if getattr(pool, name, None) is not None
    ]
    native = _quantised(pool) and getattr(pool.quant_method, "page_size", None) == space.page_tokens
    for index, layer in enumerate(layer_ids(pool)):
        for part, tensors in _parts(pool, "{}_buffer"):
            buffers.append(_data_buffer(pool, part, layer, tensors[index], space))
        for part, tensors in _parts(pool, "{}_scale_buffer"):
            buffers.append(_scale_buffer(f"{part}_scale", layer, tensors[index], space, scale_rows))
        for part, tensors in _parts(pool, "native_{}_scale_buffer"):
            if native:
                buffers.append(_scale_buffer(f"native_{part}_scale", layer, tensors[index], space, 1))
            else:
                uncovered.append(UncoveredBuffer(name=f"layers.{layer}.native_{part}_scale", reason=SCALE_PAGES))
    return section(
        "full", "full", space, buffers, settings=settings, offset=kv_token_id_vs_position_offset, uncovered=uncovered
    )


def attach_page_rows(
    pool: Any, *, settings: Settings, device: torch.device, kv_token_id_vs_position_offset: int
) -> Groups:
    """MiniMax M3: a page is one row that holds packed keys, values and scales, each a view into it."""
    space = page_space(pool)
    buffers = [
        paged_buffer(part + suffix, layer, tensors[index], pages=space.pages, row_bytes=tensors[index].shape[-1])
        for index, layer in enumerate(layer_ids(pool))
        for suffix, attribute in (("", "{}_buffer"), ("_scale", "{}_scale_buffer"))
        for part, tensors in _parts(pool, attribute)
    ]
    return section("full", "full", space, buffers, settings=settings, offset=kv_token_id_vs_position_offset)


def _parts(pool: Any, attribute: str) -> Iterator[tuple[str, Sequence[torch.Tensor]]]:
    """Those of K and V that the pool has: an index pool has keys alone, a plain pool no scales."""
    for part in _DATA:
        tensors = getattr(pool, attribute.format(part), None)
        if tensors is not None:
            yield part, tensors


def _quantised(pool: Any) -> bool:
    return bool(getattr(pool, "is_quantized_kv_cache", False))


def _data_buffer(pool: Any, part: str, layer: int, tensor: torch.Tensor, space: PageSpace) -> PageBuffer:
    # Quantised pools keep slots whatever the layout is called: they make their tensors themselves.
    slots = tensor.dim() <= 3 or _quantised(pool)
    if slots or getattr(pool, "kv_cache_layout", None) not in _PAGE_LAYOUTS:
        return paged_buffer(part, layer, tensor, pages=space.pages, rows=space.page_tokens)
    return paged_buffer(part, layer, tensor, pages=space.pages, row_bytes=tensor.shape[-1] * tensor.element_size())


def _scale_buffer(part: str, layer: int, tensor: torch.Tensor, space: PageSpace, rows: int) -> PageBuffer:
    return paged_buffer(part, layer, tensor, pages=space.pages, rows=rows)
