"""The sliding-window side of a hybrid model: its own pages, found through SGLang's map from full slots.

The map is SGLang's; a page of the window holds the same tokens as the full page that points at it, so it has the same
identity, whichever way the map changes. Used by the scheduler's thread alone.
"""

from __future__ import annotations

from typing import Any

import torch

from kv_canary_sglang.allocators import AllocatorSpace
from kv_canary_sglang.order import EventOrder


class WindowMap:
    """`space`: pages of the window."""

    def __init__(self, allocator: Any, space: AllocatorSpace, order: EventOrder) -> None:
        self.space = space
        self._allocator = allocator
        self._order = order

    def of_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots of the window for full slots; 0, a slot of the padding page, where there is none. To be called on the
        stream that the engine changes its map on.
        """
        return self._order.own(self._allocator.full_to_swa_index_mapping[slots])

    def claim(self, slots: torch.Tensor, identities: torch.Tensor, owner: int) -> None:
        """A prefix hit; let go at once, because the window moves on while the request runs."""
        pages = self.space.pages_of(slots)
        self.space.ledger.claim(pages, identities, owner)
        self.space.ledger.release(pages, owner)
