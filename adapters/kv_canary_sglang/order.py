"""Events in the order in which the scheduler thought of them, on a device that works on several streams.

SGLang allocates and frees on one stream and runs the model on another, one step behind. A ledger that was changed on
both would see the seal of a step after the page was freed. So all events go to a stream of their own, in the order of
the thread that makes them:

* it waits for what that thread has queued so far (the page numbers are there), and
* every forward pass waits for it: whatever raises a generation has run before anything may write the page.

Where a device has no streams the thread's order is the only one. Used by the scheduler's thread alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kv_canary.fences import StreamFence
from kv_canary.ledger import Fence


class EventOrder:
    """The stream of events of one scheduler."""

    def __init__(self, device: torch.device, forward_stream: Any) -> None:
        self.device = device
        self._forward_stream = forward_stream if device.type == "cuda" else None
        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream(device) if device.type == "cuda" else None

    def events(self) -> AbstractContextManager[object]:
        """What is done inside comes after all that was queued before, and after all earlier events."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)

    def hold_forward(self) -> None:
        """What is queued next on the current stream waits for all events so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """An int64 copy for an event: the engine may go on to change the original, or let go of its memory."""
        copy = values.to(torch.int64, copy=True)
        if self._stream is not None:
            copy.record_stream(self._stream)
        return copy

    def column(self, values: list[int]) -> torch.Tensor:
        """Some numbers of the host as int64 on the device, without waiting for it."""
        column = torch.tensor(values, dtype=torch.int64)
        if self._stream is None:
            return column
        column = column.pin_memory().to(self.device, non_blocking=True)
        column.record_stream(self._stream)
        return column

    def behind_forward(self) -> Fence | None:
        """A fence behind all that the model was given to do; None where work is done when it returns."""
        return StreamFence(self._forward_stream) if self._stream is not None else None
