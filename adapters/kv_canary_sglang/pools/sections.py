"""Canary groups from page buffers, and the groups of inner pools as parts of a pool that wraps them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kv_canary.geometry import CanaryGroup, PageBuffer, build_group, build_stripes, unguarded_group
from kv_canary.registry import find_attacher
from kv_canary.settings import Settings
from kv_canary.snapshot import GroupKind, UncoveredBuffer
from kv_canary_sglang.pools.spaces import PageSpace

Groups = tuple[CanaryGroup, ...]

INDEX_TABLE = "a table of slot numbers, rewritten with every allocation"

_LAYER = re.compile(r"layers\.(\d+)(?=\.)")


def section(
    name: str,
    kind: GroupKind,
    space: PageSpace,
    buffers: Sequence[PageBuffer],
    *,
    settings: Settings,
    offset: int,
    uncovered: Sequence[UncoveredBuffer] = (),
) -> Groups:
    """One group, or none where the pool holds nothing of the kind (a sub-pool without layers).

    `offset` is kv_token_id_vs_position_offset.
    """
    if space.refusal is not None:
        names = [buffer.name for buffer in buffers] + [buffer.name for buffer in uncovered]
        return (unguarded_group(name, kind, pages=space.pages, buffers=names, reason=space.refusal),) if names else ()
    if not buffers:
        return unguarded(name, kind, space, uncovered) if uncovered else ()
    return (
        build_group(
            name,
            kind,
            buffers,
            coverage=settings.coverage,
            first_page=space.first_page,
            page_tokens=space.page_tokens,
            uncovered=uncovered,
            kv_token_id_vs_position_offset=offset,
        ),
    )


def unguarded(name: str, kind: GroupKind, space: PageSpace, buffers: Sequence[UncoveredBuffer]) -> Groups:
    """A group of which nothing can be checked; the first buffer's reason stands for the group."""
    return (
        CanaryGroup(
            name=name,
            kind=kind,
            pages=space.pages,
            stripes=(),
            first_page=space.first_page,
            page_tokens=space.page_tokens,
            uncovered=tuple(buffers),
            unguarded=buffers[0].reason,
        ),
    )


def index_table(pool: Any, name: str) -> tuple[UncoveredBuffer, ...]:
    """A table that an allocator keeps in the pool, once it has."""
    return (UncoveredBuffer(name=name, reason=INDEX_TABLE),) if getattr(pool, name, None) is not None else ()


def inner_groups(pool: Any, *, settings: Settings, device: torch.device, offset: int) -> Groups:
    """The groups of a pool inside another one; `UnsupportedPoolError` names the inner class."""
    _, attacher = find_attacher(type(pool))
    return tuple(attacher(pool, settings=settings, device=device, kv_token_id_vs_position_offset=offset))


def relabel(
    group: CanaryGroup,
    *,
    name: str | None = None,
    kind: GroupKind | None = None,
    layers: Mapping[int, int] | None = None,
    uncovered: Sequence[UncoveredBuffer] = (),
) -> CanaryGroup:
    """`group` as a part of a wrapper: `layers` maps the inner pool's layer numbers to the model's."""
    numbers = layers or {}

    def rename(text: str) -> str:
        return _LAYER.sub(lambda found: f"layers.{numbers.get(int(found[1]), int(found[1]))}", text)

    buffers = [
        replace(buffer, name=rename(buffer.name), layer=numbers.get(buffer.layer, buffer.layer))
        for buffer in group.buffers
    ]
    return replace(
        group,
        name=name or group.name,
        kind=kind or group.kind,
        stripes=build_stripes(buffers) if buffers else (),
        uncovered=(*(replace(one, name=rename(one.name)) for one in group.uncovered), *uncovered),
    )


def merge(groups: Iterable[CanaryGroup]) -> Groups:
    """Groups of one name over the same pages become one; what is not guarded of it stays in its list."""
    merged: dict[str, CanaryGroup] = {}
    for group in groups:
        other = merged.get(group.name)
        if other is None:
            merged[group.name] = group
            continue
        first, second = (other, group) if other.unguarded is None else (group, other)
        buffers = sorted((*first.buffers, *second.buffers), key=lambda buffer: buffer.layer)
        merged[group.name] = replace(
            first,
            stripes=build_stripes(buffers) if buffers else (),
            uncovered=(*first.uncovered, *second.uncovered),
        )
    return tuple(merged.values())
