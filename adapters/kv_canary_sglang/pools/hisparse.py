"""HiSparse: the device holds only the tokens that were asked for last, in slots that are refilled from the host.

What a slot holds changes while the page that the allocator gave out lives on, so its bytes have no fixed owner. The
keys of the indexer stay on the device under the allocator's own numbers and are guarded.
"""

from __future__ import annotations

from typing import Any

import torch

from kv_canary.settings import Settings
from kv_canary.snapshot import UncoveredBuffer
from kv_canary_sglang.pools.dense import attach_dense
from kv_canary_sglang.pools.latent import indexer_groups, latent_buffers
from kv_canary_sglang.pools.sections import Groups, index_table, unguarded
from kv_canary_sglang.pools.spaces import page_space

DEVICE_MAPPING = "full_to_hisparse_device_index_mapping"
RECYCLED = "HiSparse refills these slots from the host while their pages live: they have no fixed content"


def attach_recycled_latent(
    pool: Any, *, settings: Settings, device: torch.device, kv_token_id_vs_position_offset: int
) -> Groups:
    space = page_space(pool)
    buffers = [UncoveredBuffer(name=buffer.name, reason=RECYCLED) for buffer in latent_buffers(pool, space)]
    buffers += index_table(pool, DEVICE_MAPPING)
    return (
        *unguarded("mla", "mla", space, buffers),
        *indexer_groups(pool, settings=settings, offset=kv_token_id_vs_position_offset),
    )


def attach_recycled_dense(
    pool: Any, *, settings: Settings, device: torch.device, kv_token_id_vs_position_offset: int
) -> Groups:
    described = attach_dense(
        pool,
        settings=Settings(),  # everything is named, whatever coverage is asked for
        device=device,
        kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
    )
    names = [buffer.name for group in described for buffer in group.buffers]
    names += [buffer.name for group in described for buffer in group.uncovered]
    space = page_space(pool)
    buffers = [UncoveredBuffer(name=name, reason=RECYCLED) for name in names]
    return unguarded("full", "full", space, [*buffers, *index_table(pool, DEVICE_MAPPING)])
