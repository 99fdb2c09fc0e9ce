"""Pools made of pools: full and sliding-window layers, full and recurrent layers, and QSA's compressed index keys."""

from __future__ import annotations

from typing import Any

import torch

from kv_canary.geometry import CanaryGroup
from kv_canary.settings import Settings
from kv_canary.snapshot import UncoveredBuffer
from kv_canary_sglang.pools.buffers import paged_buffer
from kv_canary_sglang.pools.sections import Groups, index_table, inner_groups, relabel, section
from kv_canary_sglang.pools.spaces import layer_ids, page_space

MAPPING = "full_to_swa_index_mapping"
PENDING = "a ring of a request's newest keys: it is rewritten with every token"


def attach_window(
    pool: Any, *, settings: Settings, device: torch.device, kv_token_id_vs_position_offset: int
) -> Groups:
    """The groups of the full layers as they are, those of the window layers as `swa`."""
    groups: list[CanaryGroup] = []
    tables = index_table(pool, MAPPING)
    for inner, is_window in ((pool.full_kv_pool, False), (pool.swa_kv_pool, True)):
        if inner is None:
            continue
        own = list(layer_ids(inner))
        layers = {own[index]: layer for layer, (index, swa) in pool.layers_mapping.items() if swa == is_window}
        for group in inner_groups(inner, settings=settings, device=device, offset=kv_token_id_vs_position_offset):
            if is_window:
                name = "swa.indexer" if group.kind == "indexer" else "swa"
                groups.append(relabel(group, name=name, kind="swa", layers=layers, uncovered=tables))
            else:
                groups.append(relabel(group, layers=layers))
    return tuple(groups)


def attach_hybrid(
    pool: Any, *, settings: Settings, device: torch.device, kv_token_id_vs_position_offset: int
) -> Groups:
    """The groups of the full-attention layers, and `state` for the others."""
    own = list(layer_ids(pool.full_kv_pool))
    layers = {own[index]: layer for layer, index in pool.full_attention_layer_id_mapping.items()}
    full = inner_groups(pool.full_kv_pool, settings=settings, device=device, offset=kv_token_id_vs_position_offset)
    states: Groups = ()
    if pool.mamba_pool is not None:
        states = inner_groups(pool.mamba_pool, settings=settings, device=device, offset=kv_token_id_vs_position_offset)
    return (*(relabel(group, layers=layers) for group in full), *states)


def attach_compressed_index(
    pool: Any, *, settings: Settings, device: torch.device, kv_token_id_vs_position_offset: int
) -> Groups:
    """QSA: a hybrid pool, and `indexer`: one key for every few tokens, written when the last of them is.

    The key of a group of tokens lies at the slot of the tokens divided by the ratio, so a full page has a page of keys.
    """
    groups = attach_hybrid(
        pool, settings=settings, device=device, kv_token_id_vs_position_offset=kv_token_id_vs_position_offset
    )
    space, layers = page_space(pool.full_kv_pool), list(pool.full_attention_layer_id_mapping)
    buffers = [
        paged_buffer("index_k", layer, tensor, pages=space.pages, rows=pool.qsa_compressed_page_size)
        for layer, tensor in zip(layers, pool.qsa_compressed_k_buffer_pool, strict=True)
    ]
    rings = [f"layers.{layer}.index_key_state" for layer in layers] + ["qsa_rope_position_buffer"]
    uncovered = [UncoveredBuffer(name=name, reason=PENDING) for name in rings]
    index = section(
        "indexer",
        "indexer",
        space,
        buffers,
        settings=settings,
        offset=kv_token_id_vs_position_offset,
        uncovered=uncovered if buffers else (),
    )
    return (*groups, *index)
