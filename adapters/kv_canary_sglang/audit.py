"""The audit: now and then the prefix cache's own list of slots is held against the ledger.

Every page that the tree holds must be complete, none may be free, and a page of the window must hold the tokens of the
full page that points at it. On the scheduler's thread, because the tree is its own. How long a walk takes depends on
the tree, so the next one waits a thousand times as long as the last one took.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from kv_canary_sglang.allocators import AllocatorSpace
from kv_canary_sglang.order import EventOrder
from kv_canary_sglang.window import WindowMap

logger = logging.getLogger("kv_canary")

INTERVAL_SECONDS = 10.0
SHARE = 1e-3  # of the scheduler's time
LARGEST_TREE = 262_144  # slots; a walk of a larger one could be felt


class TreeAudit:
    """`run_if_due` between two steps."""

    def __init__(
        self,
        tree: Any,
        full: AllocatorSpace,
        window: WindowMap | None,
        order: EventOrder,
        *,
        monotonic: Callable[[], float],
    ) -> None:
        self._core = getattr(tree, "tree_core", None)
        self._tree = tree
        self._full = full
        self._window = window
        self._order = order
        self._monotonic = monotonic
        self._next = monotonic() + INTERVAL_SECONDS
        self.walks = 0
        self._said = False

    @property
    def refusal(self) -> str | None:
        if not hasattr(self._core, "walk_for_kv_canary"):
            return f"the prefix cache {type(self._tree).__qualname__} cannot be walked, so it is not audited"
        return None

    def run_if_due(self) -> None:
        now = self._monotonic()
        if now >= self._next:
            self.run()
            self._next = self._monotonic() + max(INTERVAL_SECONDS, (self._monotonic() - now) / SHARE)

    def run(self) -> None:
        if (reason := self.refusal or self._too_large()) is not None:
            if not self._said:
                self._said = True
                logger.warning("%s; pages are guarded all the same", reason)
            return
        self.walks += 1
        slots = self.slots()
        with self._order.events():
            self._full.ledger.hold(self._full.first_slots(slots))
        if self._window is None:
            return
        resident = self.slots(window=True)
        window_slots = self._window.of_slots(resident)
        with self._order.events():
            known = self._full.ledger.identities(self._full.pages_of(resident))
            space = self._window.space
            last = (resident + 1) % self._full.page_size == 0  # each page once
            space.ledger.hold(torch.where(last, space.pages_of(window_slots), 0), torch.where(last, known, 0))

    def _too_large(self) -> str | None:
        held = int(self._tree.full_evictable_size())
        if held > LARGEST_TREE:
            return f"the prefix cache holds {held} slots, and one of more than {LARGEST_TREE} is not audited"
        return None

    def slots(self, *, window: bool = False) -> torch.Tensor:
        """Full slots that the tree holds, on the device; `window`: only those whose window is resident."""
        if self._core is None or self.refusal is not None:
            return torch.empty(0, dtype=torch.int64, device=self._order.device)
        found = self._core.walk_for_kv_canary(unlocked_only=False, swa_resident_only=window)
        return self._order.own(found.slot_indices.to(self._order.device))
