"""DeepSeek-V4's pool in its layouts: window rows, compressed rows of several ratios, index keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

from engines.sglang.pool_cases import Case, View, Views, interpreted, random_rows

TOKENS = 256  # of a page, always
FULL, WINDOW = 1024, 512


def build_v4(**overrides: Any) -> Any:
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    values = {"compression_ratios": [0, 4, 128, 4], "c4_size": FULL // 4, "c128_size": FULL // 128, "full_size": FULL}
    values |= {"max_num_reqs": 4, "swa_size": WINDOW, "page_size": TOKENS, "swa_page_size": TOKENS}
    values |= {"c4_state_pool_size": 4096, "c128_state_pool_size": 4096}
    values |= {"c4_state_dtype": torch.float32, "c128_state_dtype": torch.float32, "dtype": torch.float8_e4m3fn}
    values |= {"qk_nope_head_dim": 448, "qk_rope_head_dim": 64, "indexer_head_dim": 128}
    values |= overrides
    return DeepSeekV4TokenToKVPool(
        layer_num=len(values["compression_ratios"]), device="cpu", enable_memory_saver=False, **values
    )


def build_low_ratios(layout: str) -> Any:
    return build_v4(compression_ratios=[0, 1, 2, 1, 2], kv_source_layers=[1, 2], kv_layout=layout)


def build_uniform() -> Any:
    from sglang.srt.runtime_context import get_exec

    with get_exec().kernel.override(dsv4_attn_backend="trtllm"):
        return build_v4()


def build_one_tensor_a_layer(*, fp8: bool) -> Any:
    from sglang.srt.layers.attention.dsv4 import unified_kv_gate

    with patch.object(unified_kv_gate, "is_unified_kv_triton", lambda: True):
        return build_v4(unified_fp8=fp8)


def row_views(group: str, part: str, inner: Any, layers: list[int], *, page_slots: int) -> Views:
    """SGLang says itself where in a page of its kernel data and scales lie."""
    views: Views = {}
    slots = inner.page_size
    assert slots == page_slots
    data, base, scale = inner.kv_layout.row_addressing(slots)
    for number, tensor in zip(layers, inner.kv_buffer, strict=True):
        if inner.kv_layout.is_interleaved:
            views[group, f"layers.{number}.{part}"] = _columns(tensor, 0, slots * data)
        elif inner.get_bytes_per_token() != inner.kv_layout.bytes_per_token:
            views[group, f"layers.{number}.{part}"] = _columns(tensor, 0, tensor.shape[1])
        else:
            views[group, f"layers.{number}.{part}"] = _columns(tensor, 0, base)
            views[group, f"layers.{number}.{part}_scale"] = _columns(tensor, base, base + slots * scale)
    return views


def index_views(part: str, inner: Any, layers: list[int], *, page_slots: int) -> Views:
    """The index pool's pages are 64 keys: as many rows a page as it takes, keys first in each, then scales."""
    views: Views = {}
    slots, key = inner.page_size, 64 if inner.use_fp4_indexer else 128
    rows = page_slots // slots
    for number, tensor in zip(layers, inner.index_k_with_scale_buffer, strict=True):
        views["indexer", f"layers.{number}.{part}"] = _rows(tensor, rows, 0, slots * key)
        views["indexer", f"layers.{number}.{part}_scale"] = _rows(tensor, rows, slots * key, tensor.shape[1])
    return views


def _columns(tensor: torch.Tensor, start: int, stop: int) -> View:
    return lambda page: tensor[page, start:stop]


def _rows(tensor: torch.Tensor, rows: int, start: int, stop: int) -> View:
    return lambda page: tensor[page * rows : (page + 1) * rows, start:stop]


def v4_views(pool: Any, *, recycled: bool = False) -> Views:
    views = row_views("swa", "swa", pool.swa_kv_pool, [0, 1, 2, 3], page_slots=256)
    if not recycled:
        views |= row_views("mla", "c4", pool.kv_pools[4], [1, 3], page_slots=64)
    views |= row_views("mla", "c128", pool.kv_pools[128], [2], page_slots=2)
    return views | index_views("c4_index", pool.index_pools[4], [1, 3], page_slots=64)


def low_ratio_views(pool: Any) -> Views:
    """Layers 3 and 4 read what layers 1 and 2 keep."""
    views = row_views("swa", "swa", pool.swa_kv_pool, [0, 1, 2, 3, 4], page_slots=256)
    for ratio in (1, 2):
        views |= row_views("mla", f"c{ratio}", pool.kv_pools[ratio], [ratio], page_slots=256 // ratio)
        views |= index_views(f"c{ratio}_index", pool.index_pools[ratio], [ratio], page_slots=256 // ratio)
    return views


def one_tensor_views(pool: Any) -> Views:
    """SGLang's own page views of the compressed part, which it hands to HiCache."""
    views: Views = {}
    for ratio, layers in ((4, [1, 3]), (128, [2])):
        for part, found in (
            (f"c{ratio}", pool.unified_region_buffers(ratio)),
            (f"c{ratio}_rope", pool.unified_rope_region_buffers(ratio)),
        ):
            for number, tensor in zip(layers, found[0] if found else (), strict=False):
                views["mla", f"layers.{number}.{part}"] = _columns(tensor, 0, tensor.shape[1])
    return views | index_views("c4_index", pool.index_pools[4], [1, 3], page_slots=64)


def write_v4(pool: Any, group: str, slots: torch.Tensor) -> None:
    from sglang.kernels.ops.kvcache import dsa_index_k_cache, dsv4_main_kv_store

    def compressed(ratio: int) -> torch.Tensor:
        return slots[(slots + 1) % ratio == 0] // ratio

    with (
        interpreted(dsv4_main_kv_store, "_set_k_and_s_triton_kernel"),
        interpreted(dsa_index_k_cache, "_set_k_and_s_triton_kernel"),
    ):
        if group == "swa":
            for number in range(4):
                _store(pool.swa_kv_pool, number, slots)
        elif group == "mla":
            for ratio, layers in ((4, 2), (128, 1)):
                for number in range(layers):
                    _store(pool.kv_pools[ratio], number, compressed(ratio))
        else:
            for number in range(2):
                where = compressed(4)
                keys = random_rows(len(where), 128, dtype=torch.float8_e4m3fn)
                pool.index_pools[4].set_index_k_scale_buffer(number, where, keys, torch.rand(len(where), 1) + 1)


def _store(inner: Any, number: int, where: torch.Tensor) -> None:
    from sglang.kernels.ops.kvcache.dsv4_main_kv_store import NopeFp8RopeBf16Pack

    count = len(where)
    pack = NopeFp8RopeBf16Pack(
        k_nope_fp8=random_rows(count, 448, dtype=torch.float8_e4m3fn),
        k_rope_bf16=random_rows(count, 64),
        scale_k_nope_ue8m0=torch.randint(1, 256, (count, 7), dtype=torch.uint8),
    )
    inner.set_key_buffer(number, where, pack)


def states() -> dict[str, str]:
    return {
        f"{pools}.{number}.kv_score_buffer.kv_score": f"layers.{number}.{name}"
        for number in range(5)
        for pools, name in (
            ("indexer_compress_state_pools", "index_compress_state"),
            ("compress_state_pools", "compress_state"),
        )
    }


def deepseek_v4_cases() -> Iterator[Case]:
    # What is behind the last token of a page is listed once for all layers.
    pages = {"swa": WINDOW // TOKENS + 1, "mla": FULL // TOKENS + 1, "indexer": FULL // TOKENS + 1}
    padding = ("swa_kv_pool", "kv_pools", "c4_kv_pool", "c128_kv_pool")
    yield Case(
        name="DeepSeek-V4", build=build_v4, views=v4_views, write=write_v4, listed=states(), raw=padding, pages=pages
    )
    for layout in ("v41", "v41_new"):
        yield Case(
            name=f"DeepSeek-V4.1, layout {layout}",
            build=lambda layout=layout: build_low_ratios(layout),
            views=low_ratio_views,
            listed=states(),
            raw=padding,
            pages=pages,
        )
    yield Case(name="DeepSeek-V4, uniform fp8", build=build_uniform, views=v4_views, listed=states(), pages=pages)
    yield Case(
        name="DeepSeek-V4, HiSparse",
        build=lambda: build_v4(enable_hisparse=True),
        views=lambda pool: v4_views(pool, recycled=True),
        listed=states()
        | {f"c4_kv_pool.kv_buffer.{index}": f"layers.{number}.c4" for index, number in enumerate((1, 3))},
        raw=padding,
        pages=pages,
    )
    for fp8 in (False, True):
        yield Case(
            name=f"DeepSeek-V4, one tensor a layer{', fp8' if fp8 else ''}",
            build=lambda fp8=fp8: build_one_tensor_a_layer(fp8=fp8),
            views=one_tensor_views,
            listed=states()
            | {"unified_kv_pool.kv_buffer.0": "layers.0.swa", "unified_kv_pool.kv_buffer_rope.0": "layers.0.swa"},
            raw=("unified_kv_pool",),
            pages=pages,
        )
