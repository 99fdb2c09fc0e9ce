"""Token bucket that paces the background sweep, in bytes. Used by the canary thread alone."""

from __future__ import annotations

BURST_SECONDS = 0.25


class TokenBucket:
    """Fills at `rate` bytes a second up to a quarter of a second's worth; a launch may overdraw it and then waits
    longer.

    Overdrawing keeps launches whole: on average no more than the rate is read, whatever the size of a launch.
    """

    def __init__(self, rate_bytes_per_second: float, now: float) -> None:
        self.rate = rate_bytes_per_second
        self._tokens = 0.0
        self._filled_at = now

    def set_rate(self, rate_bytes_per_second: float, now: float) -> None:
        self._fill(now)
        self.rate = rate_bytes_per_second

    def delay(self, now: float) -> float:
        """Seconds until the next launch is due: 0 is now, infinity is never (rate 0)."""
        if self.rate <= 0:
            return float("inf")
        self._fill(now)
        return max(0.0, -self._tokens / self.rate)

    def spend(self, size_bytes: int) -> None:
        self._tokens -= size_bytes

    def _fill(self, now: float) -> None:
        # a clock that jumps back neither fills nor drains
        elapsed = max(0.0, now - self._filled_at)
        self._filled_at = now
        self._tokens = min(self._tokens + elapsed * self.rate, self.rate * BURST_SECONDS)
