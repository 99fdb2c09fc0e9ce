"""Pool registry: which attacher describes which pool class. Used on the thread that attaches.

    register_pool_attacher("some.engine.pools.MHAPool", attach_mha)
    groups = attach_canary_groups(pool=pool, settings=settings, device=device)

A class may be named by its dotted path, so that no engine is imported to register for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from kv_canary.errors import UnsupportedPoolError
from kv_canary.geometry import CanaryGroup
from kv_canary.settings import Settings

logger = logging.getLogger("kv_canary")


class PoolAttacher(Protocol):
    """Describes the canary groups of one pool; reads shapes and addresses, never bytes."""

    def __call__(
        self, pool: Any, *, settings: Settings, device: torch.device, kv_token_id_vs_position_offset: int
    ) -> Sequence[CanaryGroup]: ...


_attachers: dict[str, PoolAttacher] = {}


def _dotted(pool_class: type | str) -> str:
    return pool_class if isinstance(pool_class, str) else f"{pool_class.__module__}.{pool_class.__qualname__}"


def register_pool_attacher(pool_class: type | str, attacher: PoolAttacher) -> None:
    """Registers `attacher` for a class and its subclasses; registering a class again replaces its attacher."""
    _attachers[_dotted(pool_class)] = attacher


def supported_pools() -> tuple[str, ...]:
    """Dotted names of the classes with an attacher, sorted."""
    return tuple(sorted(_attachers))


def find_attacher(pool_class: type) -> tuple[str, PoolAttacher]:
    """Name and attacher of the nearest class in the method resolution order, else `UnsupportedPoolError`."""
    for ancestor in pool_class.__mro__:
        if attacher := _attachers.get(_dotted(ancestor)):
            return _dotted(ancestor), attacher
    raise UnsupportedPoolError(_dotted(pool_class), supported_pools())


def attach_canary_groups(
    *, pool: Any, settings: Settings, device: torch.device, kv_token_id_vs_position_offset: int = 0
) -> tuple[CanaryGroup, ...]:
    """Canary groups of `pool`, described by the attacher of its nearest registered class.

    `kv_token_id_vs_position_offset` is 0 for a target model and 1 for a draft pool whose input ids are shifted by one;
    every group carries it. Raises `UnsupportedPoolError` for a class without an attacher.
    """
    name, attacher = find_attacher(type(pool))
    groups = tuple(
        replace(group, kv_token_id_vs_position_offset=kv_token_id_vs_position_offset)
        for group in attacher(
            pool, settings=settings, device=device, kv_token_id_vs_position_offset=kv_token_id_vs_position_offset
        )
    )
    logger.info(
        "attached pool %s with %s: coverage %s, groups %s, kinds %s, %d buffers, %d bytes a page, "
        "fingerprint memory %d bytes, offset %d",
        _dotted(type(pool)),
        name,
        settings.coverage,
        ",".join(group.name for group in groups),
        ",".join(group.kind for group in groups),
        sum(len(group.buffers) for group in groups),
        sum(group.bytes_per_page for group in groups),
        sum(8 * len(group.stripes) * group.pages for group in groups),
        kv_token_id_vs_position_offset,
    )
    return groups
