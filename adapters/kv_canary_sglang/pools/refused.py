"""Pools whose bytes cannot be tied to the allocator's pages: they are listed, with the reason, and left alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kv_canary.registry import PoolAttacher
from kv_canary.settings import Settings
from kv_canary.snapshot import GroupKind, UncoveredBuffer
from kv_canary_sglang.pools.sections import Groups, unguarded
from kv_canary_sglang.pools.spaces import page_space

LAYER_SPLIT = "layers are spread over ranks: a layer of another rank is scratch that its owner broadcasts into"
INTERLEAVED = "pages are spread over ranks: this rank's rows do not follow the allocator's pages"
EMPTY = "the pool holds no keys and values: its tensors are placeholders"
NPU = "the layouts of the Ascend backend are not described yet"

_LISTS = (
    "kv_buffer",
    "k_buffer",
    "v_buffer",
    "k_scale_buffer",
    "v_scale_buffer",
    "kv_scale_buffer",
    "index_k_with_scale_buffer",
    "index_k_buffer",
    "index_scale_buffer",
    "remote_kv_buffer",
)


def refuse(reason: str, *, kind: GroupKind = "full") -> PoolAttacher:
    """An attacher that describes one group, all of it unguarded for `reason`."""

    def attach_refused(
        pool: Any, *, settings: Settings, device: torch.device, kv_token_id_vs_position_offset: int
    ) -> Groups:
        names = list(_tensor_names(pool)) or [type(pool).__name__]
        buffers = [UncoveredBuffer(name=name, reason=reason) for name in names]
        return unguarded(kind, kind, page_space(pool), buffers)

    return attach_refused


def _tensor_names(pool: Any) -> Iterator[str]:
    for name in _LISTS:
        tensors = getattr(pool, name, None)
        if isinstance(tensors, torch.Tensor):
            yield name
        elif tensors is not None:
            yield from (f"{name}.{index}" for index in range(len(tensors)) if len(tensors[index]))
    yield from (f"scratch.{index}" for index in range(len(getattr(pool, "_slots", ()))))
