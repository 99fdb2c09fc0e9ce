"""Where the KV of a vLLM worker lies.

All layers lie in one buffer. A `KVCacheTensor` places some layers of equal shape: block p of its layer l starts at
`offset + l * layer_stride + p * block_stride`. Inside a block the layout says whether heads or tokens come first, and
in two layouts (LHBNC, BHLNC) the heads of a block lie far apart: one run each. Groups of a hybrid model lay their
blocks over the same bytes; a block belongs to one group at a time. Block 0 takes the padding's writes and is never
guarded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kv_canary.errors import GeometryError
from kv_canary.geometry import Axis, CanaryGroup, PageBuffer, build_group, unguarded_group
from kv_canary.registry import register_pool_attacher
from kv_canary.settings import Settings
from kv_canary.snapshot import UncoveredBuffer
from kv_canary_vllm.modes import DRAFT_REASON, STATE_REASON, GroupMode, group_mode, group_names, layer_specs

_LAYER_NUMBER = re.compile(r"\.(\d+)(?:\.|$)")
_FIRST_PAGE = 1  # block 0 is the null block


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCache:
    """The pool of one worker. `tensors` maps a layer's name to the tensor that is bound to it.

    `strides(spec, blocks, layers, layer_stride, block_stride)` gives the byte strides of [layer, block, head, token,
    content]. `layers` is how many layers the target model has (those behind belong to a draft model), None if unknown.
    """

    config: Any
    tensors: Mapping[str, torch.Tensor]
    strides: Any
    layers: int | None
    refusal: str | None = None


def layer_number(name: str) -> int:
    match = _LAYER_NUMBER.search(name)
    return int(match[1]) if match else 0


def attach_worker_cache(
    pool: Any, *, settings: Settings, device: torch.device, kv_token_id_vs_position_offset: int
) -> tuple[CanaryGroup, ...]:
    """One canary group for each KV cache group of the engine, in its order."""
    config = pool.config
    modes = [group_mode(group) for group in config.kv_cache_groups]
    return tuple(
        _group(pool, name, mode, group, settings, kv_token_id_vs_position_offset)
        for name, mode, group in zip(group_names(modes), modes, config.kv_cache_groups, strict=True)
    )


def _group(pool: WorkerCache, name: str, mode: GroupMode, group: Any, settings: Settings, offset: int) -> CanaryGroup:
    pages: int = pool.config.num_blocks
    here = [layer for layer in group.layer_names if layer in pool.tensors]
    drafts = _draft_layers(pool, group, here)
    reason = pool.refusal or mode.unguarded
    if reason is None and not here:
        reason = "none of its layers has a cache on this rank"
    if reason is None and len(drafts) == len(here):
        reason = DRAFT_REASON
    if reason is not None:
        return unguarded_group(name, mode.kind, pages=pages, buffers=group.layer_names, reason=reason)
    uncovered = [UncoveredBuffer(name=layer, reason=DRAFT_REASON) for layer in drafts]
    if not mode.sealed:
        uncovered.append(UncoveredBuffer(name=f"{name}: blocks in use", reason=STATE_REASON))
    specs = layer_specs(group)
    buffers = [_buffer(pool, layer, specs[layer]) for layer in here if layer not in drafts]
    return build_group(
        name,
        mode.kind,
        sorted(buffers, key=lambda buffer: (buffer.layer, buffer.name)),
        coverage=settings.coverage,
        first_page=_FIRST_PAGE,
        page_tokens=group.kv_cache_spec.block_size,
        uncovered=uncovered,
        kv_token_id_vs_position_offset=offset,
    )


def _draft_layers(pool: WorkerCache, group: Any, here: Sequence[str]) -> list[str]:
    if not group.is_eagle_group:
        return []
    if pool.layers is None:
        return list(here)
    return [layer for layer in here if layer_number(layer) >= pool.layers]


def _buffer(pool: WorkerCache, layer: str, spec: Any) -> PageBuffer:
    """Page p of one layer: heads and tokens in the order of memory, which is the same for all pages of an engine."""
    placed, index = next(
        (tensor, tensor.layers.index(layer)) for tensor in pool.config.kv_cache_tensors if layer in tensor.layers
    )
    bound = pool.tensors[layer]
    storage = bound.untyped_storage()
    start = bound.data_ptr() - storage.data_ptr()
    pages = pool.config.num_blocks_of(placed)
    end = start + (pages - 1) * placed.block_stride
    if start < placed.offset or end > storage.nbytes():
        raise GeometryError(
            f"{layer}: its tensor starts at byte {start}, the configuration says {placed.offset} and layer {index}"
        )
    heads, states, content = spec.num_heads, spec.num_states, spec.state_content_size_bytes
    strides = pool.strides(spec, pages, len(placed.layers), placed.layer_stride, placed.block_stride)
    run, axes = _runs(((heads, strides[2]), (states, strides[3])), content)
    return PageBuffer(
        name=layer,
        layer=layer_number(layer),
        tensor=bound,
        pages=pages,
        page_stride=placed.block_stride,
        run_bytes=run,
        offset=start,
        axes=axes,
        row_bytes=content,
    )


def _runs(dimensions: Sequence[tuple[int, int]], content: int) -> tuple[int, tuple[Axis, ...]]:
    """Bytes of a run, and the axes over runs, for dimensions of (count, byte stride): what lies dense is one run."""
    run = content
    axes: list[Axis] = []
    logical = content
    for count, stride in sorted((one for one in dimensions if one[0] > 1), key=lambda one: one[1]):
        if stride == run and not axes:
            run *= count
        else:
            axes.append(Axis(count=count, memory_stride=stride, logical_stride=logical))
        logical *= count
    return run, tuple(reversed(axes))


def register() -> None:
    """Puts the worker's cache into the pool registry."""
    register_pool_attacher(WorkerCache, attach_worker_cache)
