"""MiniMax sparse attention: keys and values of all layers, and the keys (and values) of the sparse layers' indexer."""

from __future__ import annotations

from typing import Any

import torch

from kv_canary.settings import Settings
from kv_canary_sglang.pools.sections import Groups, inner_groups, merge, relabel
from kv_canary_sglang.pools.spaces import layer_ids


def attach_sparse(
    pool: Any, *, settings: Settings, device: torch.device, kv_token_id_vs_position_offset: int
) -> Groups:
    """`full` and `indexer`, both indexed by the pages of the allocator."""
    main = [
        group
        for inner in (pool.dense_pool, pool.main_pool)
        if inner is not None
        for group in inner_groups(inner, settings=settings, device=device, offset=kv_token_id_vs_position_offset)
    ]
    index = []
    for inner, mapping in (
        (pool.index_kv_pool, pool.index_kv_layer_id_mapping),
        (pool.index_k_pool, pool.index_k_layer_id_mapping),
    ):
        if inner is None:
            continue
        own = list(layer_ids(inner))
        layers = {own[position]: layer for layer, position in mapping.items()}
        for group in inner_groups(inner, settings=settings, device=device, offset=kv_token_id_vs_position_offset):
            index.append(relabel(group, name="indexer", kind="indexer", layers=layers))
    return (*merge(main), *merge(index))
