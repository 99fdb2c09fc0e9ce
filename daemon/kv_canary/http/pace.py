"""How much of a processor the HTTP thread may take from the engine, whatever clients do. Used on the HTTP thread.

The engine's thread and ours share the interpreter's lock, so a client that asks without a pause would slow down every
step. The event loop therefore has a budget of processor time: a stock that ordinary scraping and a person at the status
page never use up, and beyond it a share. A loop that has spent more sleeps, without the lock, until it has paid; before
that it looks at no socket, only at its timers now and then, and requests wait in the kernel. A loop that shall end is
not held up.

Within the stock too, a turn of the loop is followed by a pause as long as itself. To let go of the lock is not enough:
who takes it again at once is faster than the thread that waits for it, which then gets it after the interpreter's
switch interval only (5 ms), in the middle of some later turn. After the pause it is the engine that has it.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable

SHARE = 0.02  # 20 requests a second or so
STOCK_SECONDS = 0.25
LONGEST_SLEEP_SECONDS = 0.5  # the server must hear of its end, which it looks for by a timer


class Pace:
    """A token bucket in processor seconds. It may go below zero: what a turn of the loop costs is known after it."""

    def __init__(self, *, share: float, stock_seconds: float, now: float, spent: float) -> None:
        self._share, self._capacity = share, stock_seconds
        self._stock, self._now, self._spent = stock_seconds, now, spent

    def sleep_seconds(self, now: float, spent: float) -> float:
        """How long to look at no socket. `spent` is all processor time of the thread so far."""
        turn = spent - self._spent
        self._stock = min(self._capacity, self._stock + (now - self._now) * self._share) - turn
        self._now, self._spent = now, spent
        return max(turn, -self._stock / self._share)


class PacedSelector(selectors.DefaultSelector):
    """Every turn of the event loop comes by here."""

    def __init__(
        self,
        pace: Pace | None = None,
        *,
        ends: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__()
        self._ends = ends
        self._sleep = sleep
        self._pace = pace or Pace(
            share=SHARE, stock_seconds=STOCK_SECONDS, now=time.monotonic(), spent=time.thread_time()
        )

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._ends():
            return super().select(timeout)
        seconds = self._pace.sleep_seconds(time.monotonic(), time.thread_time())
        if seconds > 0:
            self._sleep(min(seconds, LONGEST_SLEEP_SECONDS))
        return super().select(timeout) if seconds <= LONGEST_SLEEP_SECONDS else []


def paced_event_loop(ends: Callable[[], bool]) -> asyncio.AbstractEventLoop:
    """To be called on the thread that will run it; `ends` is asked at every turn."""
    return asyncio.SelectorEventLoop(PacedSelector(ends=ends))
