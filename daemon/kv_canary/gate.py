"""The gate between an engine and the canary: whether hooks record, and what the engine's thread must do at its next
step.

Who writes what. `recording` is read by every hook without a lock. It changes rarely and under `_lock`: the canary
thread closes the gate and asks for it to be opened, the engine's thread opens it at a step boundary (after it has told
the ledgers everything from its own tables) and closes it when a hook fails. `epoch` counts the changes: a result that
spans one is worth nothing, because while the gate is closed nobody raises generations.
"""

from __future__ import annotations

import logging
from collections import deque
from threading import Lock
from typing import Protocol

from kv_canary.errors import CanaryMismatchError

logger = logging.getLogger("kv_canary")


class EnginePort(Protocol):
    """What the canary may ask of an engine, always on the engine's own thread and between two steps."""

    def resync(self) -> None:
        """Resets the ledgers and tells them every page's state from the engine's own tables."""

    def quarantine(self, space: str, page: int) -> str:
        """Takes a page out of the prefix cache so that it is never claimed again; returns what was done, for people."""


class EngineGate:
    """One engine's gate."""

    def __init__(self) -> None:
        self.recording = False
        self.epoch = 0
        self.steps = 0  # that the engine has taken, recorded or not; the engine's thread counts them
        self.hook_seconds: dict[str, float] = {}
        self._lock = Lock()
        self._resync_wanted = False
        self._failure: tuple[str, str] | None = None
        self._raise: str | None = None
        self._quarantine: deque[tuple[str, int, str]] = deque()
        self._done: deque[tuple[str, str]] = deque()

    # Engine's thread

    def boundary(self, engine: EnginePort) -> None:
        """To be called between two steps, recording or not.

        Raises only `CanaryMismatchError`, and only when asked to.
        """
        if self._resync_wanted:
            self._open(engine)
        while self._quarantine:
            try:
                space, page, incident = self._quarantine.popleft()
            except IndexError:  # the canary thread closed the gate in between
                break
            try:
                done = engine.quarantine(space, page)
            except Exception as error:  # noqa: BLE001 - fails open, whatever the engine's tables do
                self.fail("reaction", error)
                done = f"quarantine failed: {error!r}"
            self._done.append((incident, done))
        message, self._raise = self._raise, None
        if message is not None:
            raise CanaryMismatchError(message)

    def _open(self, engine: EnginePort) -> None:
        with self._lock:
            self._resync_wanted = False
            self.epoch += 1
            epoch = self.epoch
        try:
            engine.resync()
        except Exception as error:  # noqa: BLE001 - fails open
            self.fail("resync", error)
            return
        with self._lock:
            # closed or failed in the meantime: stay closed, what was recorded is dropped with the next resync
            if self.epoch == epoch and not self._resync_wanted:
                self.recording = True

    def forget(self) -> None:
        """What the pages held is gone (the memory was discarded, or filled by somebody else).

        Every page is unknown from here on: nothing read across this moment counts, and nothing is read before the
        engine has told its tables anew, at its next step boundary. A gate that is closed stays closed.
        """
        with self._lock:
            if self.recording or self._resync_wanted:
                self._resync_wanted = True
            self.recording = False
            self.epoch += 1
        self._quarantine.clear()

    def fail(self, component: str, error: BaseException) -> None:
        """A hook failed: it and all others fall silent, the engine goes on. May be called from any thread."""
        with self._lock:
            self.recording = False
            self.epoch += 1
            first = self._failure is None
            if first:
                self._failure = (component, f"{type(error).__name__}: {error}")
        if first:  # without the lock: what the host's log handlers do may take any time
            logger.error("canary hook %s failed; this engine is no longer guarded", component, exc_info=error)

    def reacted(self, incident: str, done: str) -> None:
        """What came of a quarantine that somebody else carried out. Any thread."""
        self._done.append((incident, done))

    # Canary thread

    def open(self) -> None:
        """Asks for recording to begin at the engine's next step boundary."""
        with self._lock:
            self._failure = None
            self._resync_wanted = True

    def close(self) -> None:
        """Hooks become no-ops at once."""
        with self._lock:
            self.recording = False
            self._resync_wanted = False
            self.epoch += 1
        self._quarantine.clear()
        self._raise = None

    def after_fork(self) -> None:
        """In a forked child, whoever held the lock: closed for good."""
        self._lock = Lock()
        self.close()

    def watch(self) -> int | None:
        """A value to compare before and after a reading: the epoch, or None while hooks are silent.

        The epoch is taken first: a gate that closes after this line has another one, whatever `recording` says yet.
        """
        epoch = self.epoch
        return epoch if self.recording else None

    @property
    def opening(self) -> bool:
        return self._resync_wanted

    @property
    def failure(self) -> tuple[str, str] | None:
        return self._failure

    def quarantine(self, space: str, page: int, incident: str) -> None:
        self._quarantine.append((space, page, incident))

    def raise_at_next_step(self, message: str) -> None:
        self._raise = message

    def reactions_done(self) -> list[tuple[str, str]]:
        """(incident id, what was done) since the last call."""
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done
