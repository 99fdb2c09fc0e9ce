"""Fences: points in the work that an engine has queued on its device; recorded on its thread, asked on ours."""

from __future__ import annotations

from typing import Any

import torch

from kv_canary.ledger import Fence


class StreamFence:
    """An event on a CUDA stream; on the current one if none is given."""

    def __init__(self, stream: Any = None) -> None:
        make_event: Any = torch.cuda.Event
        self._event = make_event()
        self._event.record(stream if stream is not None else torch.cuda.current_stream())

    def ready(self) -> bool:
        return bool(self._event.query())


def fence_for(device: torch.device) -> Fence | None:
    """A fence behind all that is queued on the current stream of `device`; None where work is done when it returns."""
    return StreamFence() if device.type == "cuda" else None
