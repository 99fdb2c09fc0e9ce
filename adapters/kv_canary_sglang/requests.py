"""Requests and their rows: who they are, with which salt their hash begins, and which cached pages they have claimed.

SGLang gives a request a row of its table of slots when it schedules it, and takes the row back when the request ends,
is retracted or aborted. A claim is made with the row and released with it. What a step needs of a request lies on the
device, by row, so that no step copies anything there.

Used by the scheduler's thread alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kv_canary.hooks import Hooks
from kv_canary.identity import Prefix, salt_from
from kv_canary.ledger.base import OwnerNames
from kv_canary.slot_chain import first_state
from kv_canary_sglang.allocators import AllocatorSpace
from kv_canary_sglang.order import EventOrder
from kv_canary_sglang.window import WindowMap


def salt_of(request: Any) -> int:
    """What the KV of a request or a key depends on besides its tokens: adapter and namespaces."""
    extra, salt = request.extra_key, request.cache_salt
    return salt_from("extra", extra or "", "salt", salt or "") if extra or salt else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Pages of the full space that a request reads and somebody else wrote."""

    pages: torch.Tensor
    owner: int


class Rows:
    """`owner` and `first_state`: int64 [rows], on the device; written when a row is given away."""

    def __init__(
        self,
        table: Any,
        tree: Any,
        full: AllocatorSpace,
        window: WindowMap | None,
        order: EventOrder,
        names: OwnerNames,
    ) -> None:
        self.table = table
        count = table.req_to_token.shape[0]
        self.owner = torch.zeros(count, dtype=torch.int64, device=order.device)
        self.first_state = torch.zeros(count, dtype=torch.int64, device=order.device)
        self._tree = tree
        self._full = full
        self._window = window
        self._order = order
        self._names = names
        self._hits: dict[str, torch.Tensor] = {}
        self._claims: dict[int, Claim] = {}

    @property
    def nbytes(self) -> int:
        return self.owner.nbytes + self.first_state.nbytes

    def hook(self, hooks: Hooks) -> None:
        hooks.wrap(self._tree, "prefix_device_indices", event="claim", after=self._after_prefix)
        hooks.wrap(self.table, "alloc", event="claim", before=self._before_alloc, after=self._after_alloc)
        hooks.wrap(self.table, "free_rows", event="release", before=self._before_free_rows)
        hooks.wrap(self.table, "clear", event="release", after=self._after_clear)

    def forget(self) -> None:
        self._hits.clear()
        self._claims.clear()

    def _after_prefix(self, token: None, slots: torch.Tensor, req: Any) -> None:
        self._hits[req.rid] = slots

    def _before_alloc(self, reqs: Sequence[Any]) -> list[Any]:
        return [req for req in reqs if not req.kv.holds_kv]

    def _after_alloc(self, fresh: list[Any], rows: list[int] | None, reqs: Sequence[Any]) -> None:
        hits, self._hits = self._hits, {}
        if rows is None or not fresh:
            return
        self.introduce(fresh)
        for req in fresh:
            slots = hits.get(req.rid)
            if slots is not None and req.prefix_len:
                self._claim(req, slots)

    def introduce(self, requests: Sequence[Any]) -> None:
        """Writes down who holds a row."""
        rows, owners, states = [], [], []
        for request in requests:
            rows.append(request.kv.req_pool_idx)
            owners.append(self._names.handle(request.rid))
            states.append(first_state(salt_of(request)))
        facts = self._order.column([*rows, *owners, *states]).view(3, len(rows))
        with self._order.events():
            self.owner[facts[0]] = facts[1]
            self.first_state[facts[0]] = facts[2]

    def _claim(self, req: Any, slots: torch.Tensor) -> None:
        """A prefix hit, judged by the request's own tokens."""
        size, length = self._full.page_size, int(req.prefix_len)
        length -= length % size
        _, identities = Prefix.empty(salt_of(req)).extended(req.full_untruncated_fill_ids[:length], size)
        owner = self._names.handle(req.rid)
        slots = self._order.own(slots[:length:size])
        told = self._order.column(identities.tolist())
        # of a window only what is still resident; it may be given back while the request runs
        window = self._window.of_slots(slots) if self._window is not None else None
        with self._order.events():
            pages = self._full.pages_of(slots)
            self._full.ledger.claim(pages, told, owner)
            if self._window is not None and window is not None:
                self._window.claim(window, told, owner)
        self._claims[req.kv.req_pool_idx] = Claim(pages=pages, owner=owner)

    def _before_free_rows(self, indices: Sequence[int]) -> None:
        for row in indices:
            claim = self._claims.pop(row, None)
            if claim is not None:
                with self._order.events():
                    self._full.ledger.release(claim.pages, claim.owner)

    def _after_clear(self, *args: Any, **kwargs: Any) -> None:
        self.forget()
