"""Pools that are views of one unified memory: their entries lie side by side, and sub-pools lie over each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from engines.sglang.pool_cases import (
    HEADS,
    WIDTH,
    Case,
    dense_views,
    latent_views,
    layer,
    random_rows,
    state_views,
    write_states,
)

TOKENS = 4
MEMORY = 1 << 18


def dense_spec(name: str, layers: int, direction: str, **options: Any) -> Any:
    from sglang.srt.mem_cache.unified_memory_pool import MHASubPoolSpec

    return MHASubPoolSpec(
        name=name,
        layer_num=layers,
        grow_direction=direction,
        head_num=HEADS,
        head_dim=WIDTH,
        store_dtype=torch.bfloat16,
        **options,
    )


def state_spec() -> Any:
    from sglang.srt.mem_cache.unified_memory_pool import MambaSubPoolSpec

    return MambaSubPoolSpec(
        name="mamba",
        layer_num=2,
        grow_direction="down",
        conv_state_shapes=((40, 3), (8, 3)),
        conv_dtype=torch.bfloat16,
        temporal_state_shape=(4, 16, 8),
        temporal_dtype=torch.float32,
    )


def build_memory(*specs: Any, **options: Any) -> Any:
    from sglang.srt.mem_cache.unified_memory_pool import UnifiedKVPool

    return UnifiedKVPool(
        total_bytes=MEMORY,
        sub_pool_specs=list(specs),
        device="cpu",
        enable_memory_saver=False,
        page_size=TOKENS,
        **options,
    )


def build_window() -> Any:
    from sglang.srt.mem_cache.unified_memory_pool import UnifiedSWAKVPool

    return UnifiedSWAKVPool(
        unified_buffer=build_memory(dense_spec("full", 3, "up"), dense_spec("swa", 1, "down")),
        swa_attention_layer_ids=[2],
        full_attention_layer_ids=[0, 1, 3],
        page_size=TOKENS,
    )


def write_window(pool: Any, group: str, slots: torch.Tensor) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    for number, (_, is_window) in pool.layers_mapping.items():
        if is_window == (group == "swa"):
            k, v = (random_rows(len(slots), HEADS, WIDTH) for _ in "kv")
            where = KVWriteLoc(slots, swa_loc=slots, full_loc=slots, physical=True)
            pool.set_kv_buffer(layer(number), where, k, v)


def build_hybrid() -> Any:
    from sglang.srt.mem_cache.unified_memory_pool import (
        MLASubPoolSpec,
        UnifiedHybridLinearKVPool,
        UnifiedMambaPool,
        UnifiedMLATokenToKVPool,
    )

    full = MLASubPoolSpec(
        name="full",
        layer_num=2,
        grow_direction="up",
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        store_dtype=torch.bfloat16,
    )
    memory = build_memory(full, state_spec())
    latent = UnifiedMLATokenToKVPool(
        unified_buffer=memory, sub_pool_name="full", kv_cache_dtype=torch.bfloat16, page_size=TOKENS
    )
    states = UnifiedMambaPool(unified_buffer=memory, sub_pool_name="mamba", spec_state_size=2, mamba_layer_ids=[0, 2])
    return UnifiedHybridLinearKVPool(
        size=latent.size,
        dtype=torch.bfloat16,
        page_size=TOKENS,
        head_num=1,
        head_dim=96,
        full_attention_layer_ids=[1, 3],
        device="cpu",
        mamba_pool=states,
        use_mla=True,
        full_kv_pool=latent,
    )


def write_hybrid(pool: Any, group: str, slots: torch.Tensor) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    if group == "state":
        return write_states(pool.mamba_pool, group, slots)
    for number in range(2):
        rows = random_rows(len(slots), 1, 96)
        pool.full_kv_pool.set_kv_buffer(layer(number), KVWriteLoc(slots, physical=True), rows, rows)
    return None


def build_draft() -> Any:
    from sglang.srt.mem_cache.layout.fused_draft import DenseDraftRegion, FusedDraftPlacement
    from sglang.srt.mem_cache.unified_draft_pool import UnifiedDraftKVPool

    region = DenseDraftRegion(lane_num=2, head_num=HEADS, head_dim=32, store_dtype=torch.bfloat16)
    memory = build_memory(
        dense_spec("full", 2, "up", draft_region=region),
        dense_spec("swa", 1, "down"),
        fused_draft=FusedDraftPlacement.from_counts(counts={"full": [2]}, regions={"full": region}),
    )
    return UnifiedDraftKVPool(
        unified_buffer=memory,
        host_sub_pool_name="full",
        host_allocator=None,
        layer_lanes={0: 0, 1: 1},
        page_size=TOKENS,
    )


def write_draft(pool: Any, group: str, slots: torch.Tensor) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    for number in range(2):
        k, v = (random_rows(len(slots), HEADS, 32) for _ in "kv")
        pool.set_kv_buffer(layer(number), KVWriteLoc(slots, physical=True), k, v)


def unified_cases() -> Iterator[Case]:
    # The sink is as long as the longest page: a page of the full layers is four entries of 3 x 512 bytes, one of the
    # window layer a third of it, and a slot of states has 4672 bytes.
    yield Case(
        name="Unified SWA",
        build=build_window,
        views=lambda pool: dense_views(pool.full_kv_pool, layers=[0, 1, 3]) | dense_views(pool.swa_kv_pool, "swa", [2]),
        write=write_window,
        raw=("_raw",),
        first_page={"swa": 3},
        shares_bytes=True,
    )
    yield Case(
        name="Unified hybrid: MLA and Mamba",
        build=build_hybrid,
        views=lambda pool: latent_views(pool.full_kv_pool, layers=[1, 3]) | state_views(pool.mamba_pool),
        write=write_hybrid,
        raw=("_raw",),
        first_page={"mla": 4},
        shares_bytes=True,
    )
    yield Case(
        name="Unified draft, in the entries of its target",
        build=build_draft,
        views=lambda pool: dense_views(pool, layers=[0, 1]),
        write=write_draft,
        foreign=("_unified_buffer",),
        shares_bytes=True,
    )
