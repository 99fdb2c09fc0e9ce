"""Streams on which the canary calls a device: of the lowest priority, so that the engine's work goes first."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def lowest_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream of its own for work on `device`; None where there are no streams."""
    if device.type != "cuda":
        return None
    make_stream: Any = torch.cuda.Stream
    stream: torch.cuda.Stream = make_stream(device, priority=0)  # 0 is the lowest that there is
    return stream


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return torch.cuda.stream(stream) if stream is not None else nullcontext()
