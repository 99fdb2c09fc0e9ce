"""The sidecar: the canary thread, and the only door to it.

Threads and what they may touch:

* The engine's thread calls the ledgers' events, the gate's `boundary`, and `suspend` and `resume`. Nothing else of ours
  runs there.
* The canary thread (`_run`) owns the `Canary` and everything below it.
* Any thread may call `snapshot` (reads one assignment), `submit` (puts a command on a queue; the answer comes through a
  future) and `attach` (builds tables in the caller's thread, compiling there, and hands them over through the same
  queue).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kv_canary.canary import NAP_SECONDS, TICK_SECONDS, Canary
from kv_canary.clock import Clock, SystemClock
from kv_canary.commands import Command, LookAtPage, MapPages
from kv_canary.errors import ConflictError, SettingsError
from kv_canary.fingerprint.backends import open_buffer_table, open_table
from kv_canary.fingerprint.table import FingerprintTable
from kv_canary.gate import EngineGate
from kv_canary.geometry import CanaryGroup
from kv_canary.ledger import Ledger
from kv_canary.process import follow, unfollow
from kv_canary.publisher import Subject
from kv_canary.settings import Settings
from kv_canary.snapshot import SidecarState, Snapshot, UncoveredBuffer

if TYPE_CHECKING:
    from kv_canary.http.service import Service

logger = logging.getLogger("kv_canary")

FAILURES_IN_A_ROW = 100
ATTACH_SECONDS = 30.0
SUSPEND_SECONDS = 2.0
CALL_SECONDS = 30.0
CALLS_A_TICK = 32
EXIT_SECONDS = 2.0
BANDWIDTH_SAMPLE_BYTES = 64 << 20


class Sidecar:
    """Guards the pools of one engine process. `start` it, `attach` pools, `detach` it."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        engine: str,
        engine_version: str,
        rank: int = 0,
        clock: Clock | None = None,
        seed: int | None = None,
    ) -> None:
        self._settings = settings or Settings.from_environment()
        self._rank = rank
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any], bool] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._door = threading.Lock()  # between putting a call and finding out that nobody takes calls any more
        self._refusal: ConflictError | None = None
        self._undo: list[Callable[[], None]] = []
        self._service: Service | None = None
        subject = Subject(engine=engine, engine_version=engine_version, rank=rank)
        self._canary = Canary(self._settings, subject, clock or SystemClock(), seed=seed)

    # Any thread

    @property
    def settings(self) -> Settings:
        return self._canary.snapshot.settings

    def snapshot(self) -> Snapshot:
        """The newest published snapshot; never blocks."""
        return self._canary.snapshot

    def submit(self, command: Command) -> Future[Any]:
        """Hands a command to the canary thread; never blocks. The future fails with what refused it."""
        return self._call(lambda: self._canary.obey(command), changes=not isinstance(command, MapPages | LookAtPage))

    def note_error(self, component: str, error: BaseException) -> None:
        """Counts and logs a failure of something around the canary (the HTTP server, an adapter)."""
        self._call(lambda: self._canary.failed(component, error))

    def attach(
        self,
        gate: EngineGate,
        pools: Sequence[tuple[Ledger, Sequence[CanaryGroup]]],
        *,
        uncovered: Sequence[UncoveredBuffer] = (),
    ) -> None:
        """Takes over the guard of some pools and asks the engine to tell their state at its next step boundary.

        Kernels are compiled and tables allocated here, in the caller's thread, so that neither happens while the engine
        serves. Returns when the canary thread has taken over, or at once when it does not run yet.
        """
        threads = self._settings.threads
        prepared = [
            (
                ledger,
                [
                    (group, open_table(group, threads=threads), open_buffer_table(group, threads=threads))
                    for group in groups
                ],
            )
            for ledger, groups in pools
        ]
        bandwidth = max(
            (_read_bandwidth(group, table) for _, tables in prepared for group, table, _ in tables), default=0.0
        )
        self._call(lambda: self._canary.take_over(gate, prepared, bandwidth, tuple(uncovered)), wait=True)

    def release(self, gate: EngineGate) -> None:
        """Lets go of an engine's pools: nothing of them is read once this returns."""
        gate.close()
        if self._refusal is None:
            self._call(lambda: self._canary.let_go(gate), wait=True)
        else:  # the thread has ended, and the pools must not stay in memory for its sake
            self._canary.let_go(gate)

    def suspend(self, reason: str, timeout_seconds: float = SUSPEND_SECONDS) -> bool:
        """Takes the engine's memory from the canary until `resume(reason)`: to capture a graph, to sleep, to unmap.

        True: nothing of ours touches it any more, and no device is called. Waits for the launch under way, a
        millisecond or two. Reasons are a set: reading goes on when none is left.

        False: that launch has not ended within `timeout_seconds`. It may still read; nothing else will, and what it
        finds is thrown away. The canary is off for good then, as after a failed hook, until a person switches it on.
        The reason stands: ask again to wait longer, and true means that it has ended. Never raises.
        """
        failure: Exception
        try:
            if self._canary.suspension.suspend(reason, timeout_seconds):
                return True
            failure = TimeoutError(f"a reading did not end within {timeout_seconds:g} s; asked for by {reason}")
        except Exception as error:  # noqa: BLE001 - the engine's thread must never see it
            failure = error
        for gate in list(self._canary.gates):
            gate.fail("suspend", failure)
        return False

    def resume(self, reason: str) -> None:
        """Takes back one reason of `suspend`; one that does not stand is nothing. Never raises."""
        self._canary.suspension.resume(reason)

    def serve(self) -> None:
        """Starts the HTTP API. When no port can be had this is logged and counted, and the guard works without it."""
        from kv_canary.http.service import Service

        try:
            service = Service(self, self._settings, rank=self._rank)
        except SettingsError:
            raise
        except Exception as error:  # noqa: BLE001 - the host goes on without the API
            self.note_error("http", error)
            notice = f"there is no HTTP API: {error}"
            self._call(lambda: self._canary.notices.append(notice))
            return
        self._service = service
        self.on_detach(service.stop)
        self._call(lambda: self._canary.reached_at(service.url, service.notice))

    def on_detach(self, undo: Callable[[], None]) -> None:
        """Has `undo` called by `detach`; the last one registered is called first."""
        self._undo.append(undo)

    def detach(self) -> None:
        """Restores everything that attaching changed, and stops. Safe to call twice and from any thread but our own."""
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:  # noqa: BLE001 - the others must still be undone
                self.note_error("thread", error)
        self.stop()

    def settle(self, timeout: float = 10.0) -> Snapshot:
        """Waits until every event so far is applied and its work done; returns the snapshot that says so."""
        return cast(Snapshot, self._call(self._canary.settle).result(timeout))

    def start(self) -> None:
        if self._thread is None:
            follow(self)
            self._thread = threading.Thread(target=self._run, name="kv-canary", daemon=True)
            self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Closes every gate and ends the thread; safe to call twice."""
        unfollow(self)
        for gate in list(self._canary.gates):
            gate.close()
        self._stopping.set()
        self._calls.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _call(self, action: Callable[[], Any], *, wait: bool = False, changes: bool = True) -> Future[Any]:
        """Has the canary thread carry out `action`. One that changes something has the next tick publish it."""
        future: Future[Any] = Future()
        if self._thread is None or self._thread is threading.current_thread():
            _settle(action, future)
            future.result()
        else:
            with self._door:
                if self._refusal is None:
                    self._calls.put((action, future, changes))
            if self._refusal is not None and not future.done():
                future.set_exception(self._refusal)
            if wait:
                future.result(timeout=CALL_SECONDS)
        return future

    # The process around us (`process`)

    def at_exit(self) -> None:
        """The interpreter ends: threads that are in the middle of native code then could bring it down."""
        if self._service is not None:
            self._service.stop()
        self.stop(timeout=EXIT_SECONDS)

    def after_fork(self) -> None:
        """In a forked child, which has none of our threads: hooks are silent, every call is refused, nothing is held.

        What `detach` would undo is the parent's.
        """
        self._undo.clear()
        self._calls, self._door = queue.SimpleQueue(), threading.Lock()
        self._canary.after_fork()
        self._refusal = ConflictError("this is a forked child; the canary guards its parent")
        if self._service is not None:
            self._service.abandon()

    # Canary thread

    def _run(self) -> None:
        state: SidecarState = "failed"
        reason = "the thread ended"
        try:
            state, reason = self._work()
        except BaseException as error:
            reason = f"the canary thread was ended by {type(error).__name__}: {error}"
            logger.critical(reason, exc_info=error)
        finally:
            self._end(state, reason)

    def _work(self) -> tuple[SidecarState, str]:
        """Until it is stopped, or cannot go on: the state that this leaves, and why."""
        failures = 0
        while not self._stopping.is_set():
            try:
                self._wait(self._canary.tick())
                failures = 0
            except Exception as error:  # noqa: BLE001 - the host must not suffer, and the canary must go on
                failures += 1
                self._canary.failed("thread", error)
                if failures >= FAILURES_IN_A_ROW:
                    logger.critical("the canary thread gives up after %d failures in a row: %s", failures, error)
                    return "failed", f"gave up after {failures} failures in a row, the last: {error}"
                self._stopping.wait(TICK_SECONDS)
        return "stopped", "the sidecar was stopped"

    def _wait(self, delay: float) -> None:
        """Sleeps until something is due or somebody calls, and carries out calls: some, for others may never end."""
        with suppress(queue.Empty):
            for number in range(CALLS_A_TICK):
                call = self._calls.get_nowait() if number else self._calls.get(timeout=max(NAP_SECONDS, delay))
                if call is not None:
                    action, future, changes = call
                    _settle(action, future)
                    if changes:
                        self._canary.publish_soon()

    def _end(self, state: SidecarState, reason: str) -> None:
        try:
            self._canary.end(state, reason)
        except BaseException as error:
            logger.critical("the canary thread did not end in order: %s", error, exc_info=error)
        with self._door:
            self._refusal = ConflictError(f"the canary thread has ended: {reason}")
        with suppress(queue.Empty):
            while True:
                if (call := self._calls.get_nowait()) is not None and call[1].set_running_or_notify_cancel():
                    call[1].set_exception(self._refusal)


def _settle(action: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(action())
    except BaseException as error:  # noqa: BLE001 - belongs to whoever asked, and must not end the thread
        future.set_exception(error)


def _read_bandwidth(group: CanaryGroup, table: FingerprintTable) -> float:
    """Bytes a second at which this group's pages are read: the better of two passes over at most 64 MB of it."""
    if not group.stripes:
        return 0.0
    count = max(1, min(group.pages - group.first_page, BANDWIDTH_SAMPLE_BYTES // group.bytes_per_page))
    pages = np.arange(group.first_page, group.first_page + count, dtype=np.int64)
    best = 0.0
    for _ in range(2):
        started = time.perf_counter()
        table.read(pages)
        best = max(best, count * group.bytes_per_page / (time.perf_counter() - started))
    return best
