"""DeepSeek-V4: sliding-window rows for every layer, and compressed rows and index keys for those that have a ratio.

A compressed row of ratio r lies at the slot of its tokens divided by r and is written with the last of them, so the
compressed pools have exactly the pages of the full allocator. The compressors' own states are rings and have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kv_canary.geometry import PageBuffer
from kv_canary.settings import Settings
from kv_canary.snapshot import GroupKind, UncoveredBuffer
from kv_canary_sglang.pools.buffers import buffer_name, paged_buffer
from kv_canary_sglang.pools.hisparse import DEVICE_MAPPING, RECYCLED
from kv_canary_sglang.pools.sections import Groups, index_table, section, unguarded
from kv_canary_sglang.pools.spaces import SINK_PAGES, PageSpace, refusal
from kv_canary_sglang.pools.wrappers import MAPPING

RING = "a ring of each request's window: it is rewritten as the request goes on"
STATE = "the compressor's state of tokens that are not compressed yet: a ring, rewritten as a request goes on"
PADDING = "bytes behind the last token of a page that are neither written nor read"
UNEVEN = "its pages do not tile a page of the allocator"


def attach_deepseek_v4(
    pool: Any, *, settings: Settings, device: torch.device, kv_token_id_vs_position_offset: int
) -> Groups:
    """`swa` by pages of the window allocator; `mla` (all ratios) and `indexer` by pages of the full allocator."""
    full_tokens = pool.c128_size * 128 if pool.full_size is None else pool.full_size
    reason = refusal(pool)
    space = PageSpace(pages=full_tokens // pool.page_size + SINK_PAGES, page_tokens=pool.page_size, refusal=reason)
    compressed, index = _Parts(), _Parts()
    for ratio, inner in pool.kv_pools.items():
        if inner is not None:
            _add_rows(compressed, inner, _layers(pool, ratio), f"c{ratio}", space, pool.page_size // ratio)
    if pool.unified_kv_pool is not None:
        _add_unified(compressed, pool, space)
    for ratio, inner in pool.index_pools.items():
        _add_index(index, inner, _layers(pool, ratio), f"c{ratio}_index", space, pool.page_size // ratio)
    compressed.uncovered += _states(pool)
    offset = kv_token_id_vs_position_offset
    groups = _window(pool, reason, settings=settings, offset=offset)
    kinds: tuple[tuple[GroupKind, _Parts], ...] = (("mla", compressed), ("indexer", index))
    for kind, parts in kinds:
        groups += section(kind, kind, space, parts.buffers, settings=settings, offset=offset, uncovered=parts.uncovered)
    return groups


class _Parts:
    def __init__(self) -> None:
        self.buffers: list[PageBuffer] = []
        self.uncovered: list[UncoveredBuffer] = []


def _layers(pool: Any, ratio: int) -> Sequence[int]:
    """The layers whose rows a pool holds, in its order. Of ratios 1 and 2 only some keep rows; the others read them."""
    if ratio in (1, 2):
        sources: Sequence[int] = pool.sources_by_ratio[ratio]
        return sources
    stage = range(pool._stage_start, pool._stage_end)
    return [layer for layer in stage if pool.compression_ratios[layer] == ratio]


def _window(pool: Any, reason: str | None, *, settings: Settings, offset: int) -> Groups:
    stage = range(pool._stage_start, pool._stage_end)
    space = PageSpace(
        pages=pool.swa_size // pool.swa_page_size + SINK_PAGES, page_tokens=pool.swa_page_size, refusal=reason
    )
    if pool.swa_kv_pool is None or pool.swa_req_ring_size is not None:
        names = [buffer_name(layer, "swa") for layer in stage]
        if pool.request_window is not None:
            names += ["request_window.workspace", "request_window.tags"]
        return unguarded("swa", "swa", space, [UncoveredBuffer(name=name, reason=RING) for name in names])
    parts = _Parts()
    _add_rows(parts, pool.swa_kv_pool, stage, "swa", space, pool.swa_page_size)
    parts.uncovered += index_table(pool, MAPPING)
    return section("swa", "swa", space, parts.buffers, settings=settings, offset=offset, uncovered=parts.uncovered)


def _add_rows(parts: _Parts, inner: Any, layers: Sequence[int], part: str, space: PageSpace, page_slots: int) -> None:
    """Rows in pages of the attention kernel: data and scales of a page apart, or side by side, or data alone."""
    slots, layout = inner.page_size, inner.kv_layout
    row = inner.get_bytes_per_token()
    if _is_a(inner, "HiSparseC4DevicePool") or page_slots % slots:
        reason = UNEVEN if page_slots % slots else RECYCLED
        parts.uncovered += [UncoveredBuffer(name=buffer_name(layer, part), reason=reason) for layer in layers]
        parts.uncovered += index_table(inner, DEVICE_MAPPING)
        return
    for layer, tensor in zip(layers, inner.kv_buffer, strict=True):
        view = tensor.view(torch.uint8)
        data = layout.data_bytes if not layout.is_interleaved and row == layout.bytes_per_token else row
        for name, start, width in ((part, 0, data), (f"{part}_scale", slots * data, row - data)):
            if width:
                piece = view[:, start : start + slots * width]
                parts.buffers.append(
                    paged_buffer(name, layer, piece, pages=space.pages, rows=page_slots // slots, row_bytes=width)
                )
    if layers and view.shape[1] > slots * row:
        parts.uncovered.append(UncoveredBuffer(name=f"{part}: page padding", reason=PADDING))


def _add_index(parts: _Parts, inner: Any, layers: Sequence[int], part: str, space: PageSpace, page_slots: int) -> None:
    slots = inner.page_size
    if page_slots % slots:
        parts.uncovered += [UncoveredBuffer(name=buffer_name(layer, part), reason=UNEVEN) for layer in layers]
        return
    rows = page_slots // slots
    if inner.index_k_with_scale_buffer is None:  # payload and scales in tensors of their own
        for layer, payload, scale in zip(layers, inner.index_k_payload_buffer, inner.index_k_scale_buffer, strict=True):
            for name, tensor in ((part, payload.view(torch.uint8)), (f"{part}_scale", scale)):
                parts.buffers.append(paged_buffer(name, layer, tensor, pages=space.pages, rows=rows))
        return
    payload_bytes = inner.index_head_dim // 2 if inner.use_fp4_indexer else inner.index_head_dim
    scale_bytes = inner.get_bytes_per_token() - payload_bytes
    for layer, tensor in zip(layers, inner.index_k_with_scale_buffer, strict=True):
        for name, start, width in ((part, 0, payload_bytes), (f"{part}_scale", slots * payload_bytes, scale_bytes)):
            piece = tensor[:, start : start + slots * width]
            parts.buffers.append(paged_buffer(name, layer, piece, pages=space.pages, rows=rows, row_bytes=width))


def _add_unified(parts: _Parts, pool: Any, space: PageSpace) -> None:
    """One tensor a layer: the window ring of all requests in front, compressed rows by slot behind it."""
    inner = pool.unified_kv_pool
    for index, layer in enumerate(range(pool._stage_start, pool._stage_end)):
        ratio = pool.compression_ratios[layer]
        for name, tensor in ((f"c{ratio}", inner.kv_buffer[index]), (f"c{ratio}_rope", inner.kv_buffer_rope[index])):
            if ratio and tensor is not None:
                rows = tensor[inner.swa_pages :]
                parts.buffers.append(paged_buffer(name, layer, rows, pages=space.pages, rows=pool.page_size // ratio))


def _states(pool: Any) -> Iterator[UncoveredBuffer]:
    for part, states in (
        ("compress_state", pool.compress_state_pools),
        ("index_compress_state", pool.indexer_compress_state_pools),
    ):
        for layer, state in enumerate(states):
            if state is not None:
                yield UncoveredBuffer(name=buffer_name(layer, part), reason=STATE)


def _is_a(pool: Any, name: str) -> bool:
    return any(one.__name__ == name for one in type(pool).__mro__)
