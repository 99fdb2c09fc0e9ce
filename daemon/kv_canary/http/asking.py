"""Asking the canary thread: one command, and its answer within a time. Runs on the HTTP thread, and never blocks it."""

from __future__ import annotations

import asyncio
from typing import Any

from kv_canary.commands import Command, Control
from kv_canary.http.problems import ProblemError


async def answer_of(control: Control, command: Command, timeout_seconds: float, stopping: asyncio.Event) -> Any:
    """What the canary thread answers; a 503 when it does not within the time, or when this server stops first."""
    name = type(command).__name__
    answer = asyncio.wrap_future(control.submit(command))
    # An answer that comes after the deadline is nobody's any more: looked at here, or asyncio reports it as forgotten.
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({answer, stop}, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()
    if answer.cancelled():
        raise ProblemError(503, f"{name} was withdrawn: the canary is stopping", command=name)
    if answer.done():
        return answer.result()
    if stopping.is_set():
        raise ProblemError(503, f"{name} has no answer yet and this server is stopping", command=name)
    # Not cancelled: the canary thread may be in the middle of it.
    raise ProblemError(
        503,
        f"{name} had no answer from the canary thread within {timeout_seconds:g} s; it may still take effect",
        command=name,
    )
