"""Recurrent states: one slot a request, rewritten with every step while the request runs.

The copies that the prefix cache keeps lie in slots of their own and are constant: whether a slot is one of them, and so
guarded, is what the runtime knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kv_canary.geometry import PageBuffer
from kv_canary.settings import Settings
from kv_canary.snapshot import UncoveredBuffer
from kv_canary_sglang.pools.buffers import NO_LAYER, paged_buffer
from kv_canary_sglang.pools.sections import Groups, section
from kv_canary_sglang.pools.spaces import PageSpace, slot_space

SCRATCH = "scratch of a running request: what is kept of it goes into the state"

_SCRATCH = (
    "intermediate_ssm",
    "intermediate_conv_window",
    "intermediate_conv_state",
    "intermediate_context",
    "replayssm_d",
    "replayssm_k",
    "replayssm_g",
    "replayssm_rawv",
    "replayssm_rawk",
    "replayssm_beta",
)


def attach_states(
    pool: Any, *, settings: Settings, device: torch.device, kv_token_id_vs_position_offset: int
) -> Groups:
    """One group, `state`: convolution windows and temporal states of all layers, and what rides along in the slot."""
    space, cache = slot_space(pool), pool.mamba_cache
    buffers = [
        paged_buffer(part, layer, tensor[index], pages=space.pages)
        for index, layer in enumerate(pool.mamba_layer_ids)
        for part, tensor in (*((f"conv{n}", conv) for n, conv in enumerate(cache.conv)), ("temporal", cache.temporal))
    ]
    buffers += _siblings(pool, space)
    owners = (cache, *getattr(pool, "_slot_siblings", ()))
    uncovered = [
        UncoveredBuffer(name=name, reason=SCRATCH)
        for name in _SCRATCH
        if any(getattr(owner, name, None) is not None for owner in owners)
    ]
    return section(
        "state", "state", space, buffers, settings=settings, offset=kv_token_id_vs_position_offset, uncovered=uncovered
    )


def _siblings(pool: Any, space: PageSpace) -> Iterator[PageBuffer]:
    for sibling in getattr(pool, "_slot_siblings", ()):
        for kind, tensor, _, layer in sibling.iter_transfer_state_entries():
            # State of the whole request has a number far above all layers.
            number = layer if layer < 1 << 24 else NO_LAYER
            yield paged_buffer(kind, number, tensor, pages=space.pages)
