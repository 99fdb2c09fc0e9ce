"""Time, injected: everything that waits or dates something takes a `Clock`, so that tests decide what time it is."""

from __future__ import annotations

import time as _time
from typing import Protocol


class Clock(Protocol):
    """Two readings: `time` dates things for people (seconds since 1970), `monotonic` measures durations (seconds)."""

    def time(self) -> float: ...

    def monotonic(self) -> float: ...


class SystemClock:
    """The machine's own clocks."""

    time = staticmethod(_time.time)
    monotonic = staticmethod(_time.monotonic)
