"""Tells the ledgers every page's state from the engine's own tables: at the start, and whenever hooks were silent.

Runs on the scheduler's thread between two steps. What the tree holds, and what running requests have written in whole
pages, is complete behind the step in flight; a page that a request is still writing is open; the free list is free.
Of what is none of these nothing is known, and nothing is claimed of it. Which tokens the pages hold is not known
either: prefix hits on them are counted as not covered until they are written anew. Unlike a step this waits for the
device: it happens at the start and when a person switches the canary on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kv_canary.slot_chain import SlotChain
from kv_canary_sglang.allocators import PADDING, AllocatorSpace
from kv_canary_sglang.audit import TreeAudit
from kv_canary_sglang.order import EventOrder
from kv_canary_sglang.requests import Rows
from kv_canary_sglang.window import WindowMap


class Resync:
    """`run` starts from nothing."""

    def __init__(
        self,
        scheduler: Any,
        full: AllocatorSpace,
        window: WindowMap | None,
        rows: Rows,
        chain: SlotChain,
        audit: TreeAudit,
        order: EventOrder,
    ) -> None:
        self._scheduler = scheduler
        self._full = full
        self._window = window
        self._rows = rows
        self._chain = chain
        self._audit = audit
        self._order = order

    def run(self) -> None:
        full, window, order = self._full, self._window, self._order
        running = list(self._holders())
        held, open_slots = self._slots_of(running)
        cached = self._audit.slots()
        with order.events():
            full.ledger.reset()
            self._chain.forget()
            self._adopt(full, torch.cat([cached, held]), open_slots)
            full.adopt_free()
        if window is not None:
            resident = window.of_slots(torch.cat([self._audit.slots(window=True), held]))
            open_window = window.of_slots(open_slots)
            with order.events():
                window.space.ledger.reset()
                self._adopt(window.space, resident, open_window)
                window.space.adopt_free()
        self._rows.forget()
        if running:
            self._rows.introduce(running)

    def _adopt(self, space: AllocatorSpace, complete: torch.Tensor, opened: torch.Tensor) -> None:
        """Slots of whole pages, and slots of pages that are still written."""
        pages = torch.unique(space.pages_of(complete))
        space.ledger.adopt(pages[pages != PADDING], fence=self._order.behind_forward())
        pages = torch.unique(space.pages_of(opened))
        space.ledger.allocate(pages[pages != PADDING])

    def _slots_of(self, requests: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of whole written pages, and of the pages behind them."""
        size, table = self._full.page_size, self._rows.table.req_to_token
        complete = [torch.empty(0, dtype=torch.int64, device=self._order.device)]
        opened = list(complete)
        for request in requests:
            row, written = table[request.kv.req_pool_idx], int(request.kv.kv_committed_len)
            whole = written - written % size
            complete.append(row[:whole].to(torch.int64))
            opened.append(row[whole : int(request.kv.kv_allocated_len)].to(torch.int64))
        return torch.cat(complete), torch.cat(opened)

    def _holders(self) -> Iterator[Any]:
        """Requests that hold a row, each once."""
        scheduler, seen = self._scheduler, set()
        batches = [scheduler.running_batch, getattr(scheduler, "last_batch", None)]
        batches += list(getattr(scheduler, "running_mbs", None) or [])
        candidates = [request for batch in batches if batch is not None for request in batch.reqs]
        candidates += [request for request in (getattr(scheduler, "chunked_req", None),) if request is not None]
        candidates += list(scheduler.waiting_queue)
        for request in candidates:
            row = request.kv.req_pool_idx
            if row is not None and row not in seen:
                seen.add(row)
                yield request
