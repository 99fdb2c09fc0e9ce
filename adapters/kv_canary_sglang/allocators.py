"""A page-number space: one allocator's pages and their ledger. The scheduler's thread alone calls it.

A page is the allocator's page: `page_size` slots in a row; page 0 is where padding is written, and stands for "none"
in every event. Pages leave the free list in whole pages, so a slot that is the first of its page and is handed out is
a page that is handed out; nothing of this is known on the host.

A page has one owner from its allocation to its return, be it a request or the prefix cache after it; a prefix hit adds
one more until the request gives its row back.
"""

from __future__ import annotations

from typing import Any

import torch

from kv_canary.hooks import Hooks
from kv_canary.ledger import TensorLedger
from kv_canary.ledger.base import OwnerNames
from kv_canary_sglang.order import EventOrder

PADDING = 0

_TOKEN, _PAGED = "TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator"
MODELLED_ALLOCATORS = (_TOKEN, _PAGED)


class AllocatorSpace:
    """The pages of one allocator."""

    def __init__(self, name: str, allocator: Any, order: EventOrder, names: OwnerNames) -> None:
        self.name = name
        self.page_size = int(allocator.page_size)
        self.pages = int(allocator.size) // self.page_size + 1
        self._allocator = allocator
        self._order = order
        self.ledger = TensorLedger(name, self.pages, order.device, names=names, padding=PADDING)

    def hook(self, hooks: Hooks) -> None:
        allocator = self._allocator
        hooks.wrap(allocator, "alloc", event="allocate", after=self._after_allocation)
        if type(allocator).__name__ == _PAGED:
            hooks.wrap(allocator, "alloc_extend", event="allocate", after=self._after_allocation)
            hooks.wrap(allocator, "alloc_decode", event="allocate", after=self._after_allocation)
            hooks.wrap(allocator, "_release_page_ids", event="free", before=self._before_release)
        else:
            hooks.wrap(allocator, "free", event="free", before=self._before_free)
        hooks.wrap(allocator, "clear", event="clear", after=self._after_clear)

    # Slots to pages

    def pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        return slots // self.page_size

    def first_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Pages of those slots that are the first of their page; the padding page in the place of the others."""
        return torch.where(slots % self.page_size == 0, slots // self.page_size, PADDING)

    def completed_by(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Pages that are complete with these tokens; the padding page in the place of the others."""
        return torch.where((positions + 1) % self.page_size == 0, slots // self.page_size, PADDING)

    # The free list

    def _after_allocation(self, token: None, slots: torch.Tensor | None, *args: Any, **kwargs: Any) -> None:
        if slots is None:
            return
        slots = self._order.own(slots)
        with self._order.events():
            self.ledger.allocate(self.first_slots(slots))

    def _before_free(self, free_index: torch.Tensor) -> None:
        if self._allocator.free_group is None and free_index.numel():
            self._freed(free_index)

    def _before_release(self, *page_ids: torch.Tensor) -> None:
        for pages in page_ids:
            if pages.numel():
                self._freed(pages)

    def _freed(self, pages: torch.Tensor) -> None:
        pages = self._order.own(pages)
        with self._order.events():
            self.ledger.release(pages)
            # the step in flight may still write them: what they hold counts from its end on
            self.ledger.free(pages, fence=self._order.behind_forward())

    def _after_clear(self, *args: Any, **kwargs: Any) -> None:
        pages = torch.arange(PADDING + 1, self.pages, device=self._order.device)
        with self._order.events():
            self.ledger.forget(pages)
            self.ledger.free(pages, fence=self._order.behind_forward())

    # From the engine's own tables

    def adopt_free(self) -> None:
        """The pages of the free list, after `reset`."""
        free = self._allocator.get_all_free_pages()
        self.ledger.free(self._order.own(free), fence=self._order.behind_forward())
