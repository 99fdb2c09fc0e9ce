"""What a forward pass writes: before it, which pages; after it, which of them are complete, and what they hold.

Wraps `ModelRunner.forward`, which runs for every step, at the replay of a graph too. Everything is taken from what goes
into the step (slots, tokens, positions), so a fault in the engine's own bookkeeping of tokens shows at the next prefix
hit. A sequence's pages begin at multiples of the page size, so a page is complete with the token whose position is the
last of a page. Nothing is known on the host, and nothing is asked of the device.

Used by the scheduler's thread alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kv_canary.hooks import Hooks
from kv_canary.slot_chain import SlotChain
from kv_canary_sglang.allocators import AllocatorSpace
from kv_canary_sglang.order import EventOrder
from kv_canary_sglang.requests import Rows
from kv_canary_sglang.window import WindowMap


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward pass: slots, positions and identities of its tokens, int64 [tokens]."""

    slots: torch.Tensor
    window_slots: torch.Tensor | None
    positions: torch.Tensor
    identities: torch.Tensor


class StepRecorder:
    """Hooks the target model's runner."""

    def __init__(
        self, full: AllocatorSpace, window: WindowMap | None, rows: Rows, chain: SlotChain, order: EventOrder
    ) -> None:
        self._full = full
        self._window = window
        self._rows = rows
        self._chain = chain
        self._order = order
        self.number = 0

    def hook(self, hooks: Hooks, runner: Any) -> None:
        hooks.wrap(runner, "forward", event="step", before=self._before, after=self._after)

    def _before(self, forward_batch: Any, *args: Any, **kwargs: Any) -> Step | None:
        mode = forward_batch.forward_mode
        slots = forward_batch.out_cache_loc
        if mode.is_idle() or slots is None or not len(slots):
            return None
        self.number += 1
        own, rows_of = self._order.own, forward_batch.req_pool_indices
        extends = not mode.is_decode()
        slots, positions = own(slots), own(forward_batch.positions)
        tokens = own(forward_batch.input_ids) if forward_batch.input_ids is not None else None
        lengths = own(forward_batch.extend_seq_lens) if extends else None
        first = positions if lengths is None else positions[torch.cumsum(lengths, 0) - lengths]
        # read here, on the stream of the step: the engine goes on to change both tables for the next one
        behind = own(self._rows.table.req_to_token[rows_of, (first - 1).clamp_(min=0)])
        rows_of, first = own(rows_of), own(first)
        window_slots = self._window.of_slots(slots) if self._window is not None else None
        with self._order.events():
            self._full.ledger.step(self.number)
            before = torch.where(first > 0, self._chain.state[behind], self._rows.first_state[rows_of])
            owners = self._rows.owner[rows_of]
            if tokens is None:  # embeddings instead of tokens: what the pages hold is not known
                before, tokens = torch.zeros_like(before), torch.zeros_like(slots)
            if lengths is None:
                identities = self._chain.append_one(slots, tokens, positions, before)
            else:
                longest = max(forward_batch.extend_seq_lens_cpu)
                identities = self._chain.append(slots, tokens, positions, before, lengths, longest)
                owners = torch.repeat_interleave(owners, lengths, output_size=len(slots))
            self._full.ledger.write(self._full.pages_of(slots), owners)
            if self._window is not None and window_slots is not None:
                space = self._window.space
                space.ledger.step(self.number)
                space.ledger.write(space.pages_of(window_slots), owners)
        self._order.hold_forward()
        return Step(slots=slots, window_slots=window_slots, positions=positions, identities=identities)

    def _after(self, step: Step | None, result: Any, *args: Any, **kwargs: Any) -> None:
        if step is None:
            return
        fence = self._order.behind_forward()
        with self._order.events():
            self._seal(self._full, step.slots, step, fence)
            if self._window is not None and step.window_slots is not None:
                self._seal(self._window.space, step.window_slots, step, fence)

    def _seal(self, space: AllocatorSpace, slots: torch.Tensor, step: Step, fence: Any) -> None:
        space.ledger.seal(space.completed_by(slots, step.positions), step.identities, fence=fence)
