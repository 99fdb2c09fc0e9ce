"""The handshake by which an engine takes its memory away from the canary for a while: to capture a CUDA graph, to
sleep, to unmap.

Who writes what: the reasons, the number of readings under way and the stretches of time are written under one lock, by
the engine's thread (`suspend`, `resume`) and by the canary thread (`reading`). The lock is held for a few instructions
only, never while anything is read.

Why there is no race. Whatever touches engine memory does so inside `reading`. Entering looks for reasons and counts the
reading in one hold of the lock; `suspend` adds its reason and looks at the count in one hold too. So either entering
comes first, and `suspend` sees the count and waits until it is zero, or `suspend` comes first, and entering sees the
reason and is refused. Leaving, if somebody waits, first has the device finish what was launched, and only then counts
down: true from `suspend` means that nothing runs any more, on the processor or on a side stream, and that nothing
starts while a reason is left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

_REMEMBERED_STRETCHES = 64


class Reading:
    """One section in which engine memory may be touched, if it is allowed. A class: it is entered many times a tick."""

    __slots__ = ("_allowed", "_suspension")

    def __init__(self, suspension: Suspension) -> None:
        self._suspension = suspension
        self._allowed = False

    def __enter__(self) -> bool:
        self._allowed = self._suspension._enter()
        return self._allowed

    def __exit__(self, *failure: object) -> None:
        if self._allowed:
            self._suspension._leave()


class Suspension:
    """Reasons not to touch engine memory, and how long there was one."""

    def __init__(self, *, monotonic: Callable[[], float], synchronize: Callable[[], None]) -> None:
        self._monotonic = monotonic
        self._synchronize = synchronize
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._reasons: set[str] = set()
        self._readings = 0
        self._since = 0.0
        self._stretches: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED_STRETCHES)

    # Engine's thread

    def suspend(self, reason: str, timeout_seconds: float) -> bool:
        """True: nothing is read any more. False: a reading that was under way has not ended yet; no other will start.

        Either way the reason stands until it is resumed.
        """
        with self._lock:
            if not self._reasons:
                self._since = self._monotonic()
            self._reasons.add(reason)
            return self._changed.wait_for(lambda: not self._readings, timeout_seconds)

    def resume(self, reason: str) -> None:
        """Takes a reason back; reading goes on when none is left."""
        with self._lock:
            if reason in self._reasons:
                self._reasons.remove(reason)
                if not self._reasons:
                    self._stretches.append((self._since, self._monotonic()))

    # Canary thread

    def reading(self) -> Reading:
        """`with suspension.reading() as allowed:` is a section that may touch engine memory if `allowed` is true.

        Short: `suspend` waits for its end.
        """
        return Reading(self)

    def _enter(self) -> bool:
        with self._lock:
            allowed = not self._reasons
            self._readings += allowed
            return allowed

    def _leave(self) -> None:
        with self._lock:
            if not self._reasons:
                self._count_down()
                return
        try:
            self._synchronize()
        finally:
            with self._lock:
                self._count_down()

    def _count_down(self) -> None:
        self._readings -= 1
        self._changed.notify_all()

    def after_fork(self) -> None:
        """In a forked child, whoever held the lock: the reading that was under way is the parent's."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._readings = 0

    @property
    def reasons(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(sorted(self._reasons))

    def seconds_within(self, age: float) -> float:
        """For how many of the last `age` seconds nothing could be read."""
        with self._lock:
            now = self._monotonic()
            stretches = [*self._stretches, (self._since, now)] if self._reasons else list(self._stretches)
        return sum(max(0.0, end - max(start, now - age)) for start, end in stretches)
