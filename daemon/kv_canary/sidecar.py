"""The sidecar: the canary thread, and the only door to it.

Threads and what they may touch:

* The engine's thread calls the ledgers' events and the gate's `boundary`. Nothing else of ours runs there.
* The canary thread (this module's `_run`) owns everything below: it applies events, seals, verifies, confirms, drills,
  reports, and publishes one immutable snapshot by assignment.
* Any thread may call `snapshot` (reads that assignment), `submit` (puts a command on a queue; the answer comes through
  a future) and `attach` (builds tables in the caller's thread, compiling there, and hands them over through the same
  queue).
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, cast

import numpy as np

from kv_canary.clock import Clock, SystemClock
from kv_canary.commands import Command, PatchSettings, RequestDrill, RequestSweep, SetEnabled, SetGroupEnabled
from kv_canary.drills import Drills
from kv_canary.errors import ConflictError, KVCanaryError, NotFoundError, SettingsError
from kv_canary.fingerprint.table import FingerprintTable, open_table
from kv_canary.gate import EngineGate
from kv_canary.geometry import CanaryGroup
from kv_canary.guard import GroupGuard, Space
from kv_canary.incidents import IncidentLog
from kv_canary.ledger import Ledger
from kv_canary.publisher import Errors, Publisher, Subject
from kv_canary.reporter import Reporter
from kv_canary.scrubber import Scrubber
from kv_canary.settings import Settings
from kv_canary.snapshot import SidecarState, Snapshot, UncoveredBuffer
from kv_canary.verifier import Verifier
from kv_canary.worker import SpaceWorker

logger = logging.getLogger("kv_canary")

TICK_SECONDS = 0.02
PUBLISH_SECONDS = 0.25
PIECE_SECONDS = 100e-6  # Python work between two releases of the GIL
NAP_SECONDS = 50e-6
FAILURES_IN_A_ROW = 100
BANDWIDTH_SAMPLE_BYTES = 64 << 20


class Sidecar:
    """Guards the pools of one engine process. `start` it, `attach` pools, `stop` it."""

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
        self._clock = clock or SystemClock()
        self._subject = Subject(engine=engine, engine_version=engine_version, rank=rank)
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._gates: list[EngineGate] = []
        self._spaces: list[Space] = []
        self._guards: list[GroupGuard] = []
        self._workers: list[SpaceWorker] = []
        self._uncovered: tuple[UncoveredBuffer, ...] = ()
        self._enabled = True
        self._state: SidecarState = "waiting"
        self._reason: str | None = "no pool is attached yet"
        self._url: str | None = None
        self._errors = Errors()
        self._piece_started = 0.0
        self._undo: list[Callable[[], None]] = []
        clock_, settings_ = self._clock, self._settings
        self._incidents = IncidentLog(
            settings_.incident_capacity,
            path=settings_.incident_log,
            maximum_bytes=settings_.incident_log_bytes,
            backups=settings_.incident_log_backups,
            on_error=lambda error: self._failed("incident_log", error),
        )
        self._reporter = Reporter(
            self._incidents, settings=lambda: self._settings, time=clock_.time, monotonic=clock_.monotonic
        )
        self._scrubber = Scrubber(
            self._guards, budget=settings_.budget, read_bandwidth=0.0, monotonic=clock_.monotonic, time=clock_.time
        )
        self._drills = Drills(
            self._guards, monotonic=clock_.monotonic, time=clock_.time, random_source=random.Random(seed)
        )
        self._next_drill = 0.0
        self._publisher = Publisher(
            spaces=self._spaces,
            guards=self._guards,
            gates=self._gates,
            scrubber=self._scrubber,
            drills=self._drills,
            incidents=self._incidents,
            errors=self._errors,
            time=clock_.time,
            breathe=self._breathe,
        )
        self._next_publish = 0.0
        self._sweep_count = 0
        self._snapshot = self._build()

    # Any thread

    @property
    def settings(self) -> Settings:
        return self._snapshot.settings

    def snapshot(self) -> Snapshot:
        """The newest published snapshot; never blocks."""
        return self._snapshot

    def submit(self, command: Command) -> Future[Any]:
        """Hands a command to the canary thread; never blocks. The future fails with what refused it."""
        return self._call(lambda: self._obey(command))

    def set_url(self, url: str | None) -> None:
        """The address at which people reach this sidecar."""
        self._call(lambda: setattr(self, "_url", url))

    def note_error(self, component: str, error: BaseException) -> None:
        """Counts and logs a failure of something around the canary (the HTTP server, an adapter)."""
        self._call(lambda: self._failed(component, error))

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
        prepared = [
            (ledger, [(group, open_table(group, threads=self._settings.threads)) for group in groups])
            for ledger, groups in pools
        ]
        bandwidth = max(
            (_read_bandwidth(group, table) for _, tables in prepared for group, table in tables), default=0.0
        )
        self._call(lambda: self._take_over(gate, prepared, bandwidth, tuple(uncovered)), wait=True)

    def release(self, gate: EngineGate) -> None:
        """Lets go of an engine's pools: nothing of them is read once this returns."""
        gate.close()
        self._call(lambda: self._let_go(gate), wait=True)

    def settle(self, timeout: float = 10.0) -> Snapshot:
        """Waits until every event so far is applied and its work done; returns the snapshot that says so."""
        return cast(Snapshot, self._call(self._settle_now).result(timeout))

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv-canary", daemon=True)
            self._thread.start()

    def serve(self) -> None:
        """Starts the HTTP API. When no port can be had this is logged and counted, and the guard works without it."""
        from kv_canary.http.service import Service

        try:
            service = Service(self, self._settings, rank=self._subject.rank)
        except SettingsError:
            raise
        except Exception as error:  # noqa: BLE001 - the host goes on without the API
            self.note_error("http", error)
            return
        self.on_detach(service.stop)
        self.set_url(service.url)

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

    def stop(self, timeout: float = 5.0) -> None:
        """Closes every gate and ends the thread; safe to call twice."""
        for gate in list(self._gates):
            gate.close()
        self._stopping.set()
        self._commands.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _call(self, action: Callable[[], Any], *, wait: bool = False) -> Future[Any]:
        future: Future[Any] = Future()
        if self._thread is None or self._thread is threading.current_thread():
            _settle(action, future)
            future.result()
        elif not self._thread.is_alive():
            future.set_exception(ConflictError(f"the canary thread has ended: {self._snapshot.reason or 'stopped'}"))
        else:
            self._commands.put((action, future))
            if wait:
                future.result(timeout=30)
        return future

    # Canary thread

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                self._wait(self._tick())
                failures = 0
            except Exception as error:  # noqa: BLE001 - the host must not suffer, and the canary must go on
                failures += 1
                self._failed("thread", error)
                if failures >= FAILURES_IN_A_ROW:
                    self._die(error)
                    return
                self._stopping.wait(TICK_SECONDS)
        self._end("stopped", "the sidecar was stopped")

    def _wait(self, delay: float) -> None:
        """Sleeps until something is due or somebody calls, and carries out the calls."""
        try:
            call = self._commands.get(timeout=delay) if delay > 0 else self._commands.get_nowait()
            while True:
                if call is not None:
                    _settle(*call)
                    self._next_publish = 0.0
                call = self._commands.get_nowait()
        except queue.Empty:
            return

    def _tick(self) -> float:
        """Does what is due, in short pieces; returns the seconds until something is due again."""
        self._piece_started = time.perf_counter()
        for gate in self._gates:
            self._watch(gate)
        backlog = False
        for worker in self._workers:
            with self._component("ledger", worker.space.guards):
                backlog |= worker.run()
        if self._enabled:
            with self._component("drill", ()):
                self._drill_if_due()
                self._drills.run(self._reporter.drill)
            with self._component("scrubber", ()):
                self._scrubber.advance(self._finding)
        now = self._clock.monotonic()
        if now >= self._next_publish:
            self._publisher.survey()
            self._snapshot = self._build()
            self._next_publish = now + PUBLISH_SECONDS
        if backlog or self._drills.pending:
            return NAP_SECONDS
        return max(NAP_SECONDS, min(TICK_SECONDS, self._scrubber.delay()))

    def _settle_now(self) -> Snapshot:
        until = self._clock.monotonic() + 5.0
        while self._clock.monotonic() < until:
            busy = [worker.run() for worker in self._workers]  # every one of them, so no any() over a generator
            if not any(busy):
                break
            self._breathe()
        self._publisher.survey()
        self._snapshot = self._build()
        return self._snapshot

    def _watch(self, gate: EngineGate) -> None:
        for incident, reaction in gate.reactions_done():
            self._incidents.set_reaction(incident, reaction)
            self._next_publish = 0.0
        failure = gate.failure
        if failure is not None:
            component, text = failure
            for guard in self._guards:
                if guard.gate is gate and guard.enabled:
                    guard.switch(False, f"hook {component} failed: {text}")
                    self._errors.count("hook", f"{component}: {text}")
                    self._next_publish = 0.0
        for space in self._spaces:
            if space.gate is gate and gate.recording and space.ledger.overrun:
                self._failed(
                    "ledger", KVCanaryError(f"events of {space.ledger.name} were lost; reading its tables anew")
                )
                gate.close()
                gate.open()

    def _drill_if_due(self) -> None:
        now = self._clock.monotonic()
        ready = [g for g in self._guards if g.active and len(g.verifier.select(0, min(g.group.pages, 65_536)))]
        if now >= self._next_drill and ready:
            guard = ready[int(now) % len(ready)]
            # the engine may have closed its gate since: then there is nothing to prove now
            with suppress(ConflictError):
                self._drills.request("fingerprint", guard.group.name, automatic=True, alert=False, content_allowed=False)
                self._next_drill = now + self._settings.drill_interval

    def _finding(self, guard: GroupGuard, finding: Any) -> bool:
        self._next_publish = 0.0
        return self._reporter.finding(guard, finding)

    def _obey(self, command: Command) -> Any:
        answer: Any = None
        match command:
            case SetEnabled(enabled=enabled):
                self._set_enabled(enabled)
            case SetGroupEnabled(group=name, enabled=enabled):
                guard = self._guard(name)
                if enabled and guard.gate.failure is not None:
                    guard.gate.open()
                guard.switch(enabled, "switched off by a person")
            case PatchSettings(changes=changes):
                self._settings = self._settings.patched(changes)
                self._scrubber.set_budget(self._settings.budget, self._scrubber.read_bandwidth)
                self._next_drill = min(self._next_drill, self._clock.monotonic() + self._settings.drill_interval)
            case RequestSweep(group=name):
                self._must_be_on()
                guards = [self._guard(name)] if name else [guard for guard in self._guards if guard.active]
                if not guards or not all(guard.active for guard in guards):
                    raise ConflictError("there is no group to sweep: " + (f"{name} is off" if name else "none is on"))
                self._sweep_count += 1
                answer = self._scrubber.request(f"sweep-{self._sweep_count:06d}", guards)
            case RequestDrill(kind=kind, group=name, alert=alert):
                self._must_be_on()
                if name:
                    self._guard(name)
                answer = self._drills.request(
                    kind, name, automatic=False, alert=alert, content_allowed=self._settings.allow_content_drills
                )
        self._snapshot = self._build()  # whoever asked finds the outcome in the very next snapshot
        return answer

    def _set_enabled(self, enabled: bool) -> None:
        if enabled == self._enabled and not any(gate.failure for gate in self._gates):
            return
        self._enabled = enabled
        for gate in self._gates:
            if enabled:
                gate.open()
            else:
                gate.close()
        for guard in self._guards:
            guard.verifier.forget()
            if enabled and (guard.disabled_reason or "").startswith("hook "):
                guard.switch(True)
        if not enabled:
            self._scrubber.interrupt()
        self._state = "running" if enabled and self._guards else "disabled" if not enabled else "waiting"
        self._reason = (
            None if enabled and self._guards else "switched off" if not enabled else "no pool is attached yet"
        )
        logger.info("canary switched %s", "on" if enabled else "off")

    def _guard(self, name: str) -> GroupGuard:
        for guard in self._guards:
            if guard.group.name == name:
                return guard
        known = ", ".join(guard.group.name for guard in self._guards) or "none"
        raise NotFoundError(f"there is no group {name!r}; groups: {known}")

    def _must_be_on(self) -> None:
        if not self._enabled:
            raise ConflictError("the canary is switched off; switch it on first")

    def _take_over(
        self,
        gate: EngineGate,
        prepared: Sequence[tuple[Ledger, Sequence[tuple[CanaryGroup, FingerprintTable]]]],
        bandwidth: float,
        uncovered: tuple[UncoveredBuffer, ...],
    ) -> None:
        for ledger, tables in prepared:
            space = Space(ledger=ledger, gate=gate)
            for group, table in tables:
                verifier = Verifier(group, ledger, table, watch=lambda: gate.epoch, monotonic=self._clock.monotonic)
                space.guards.append(GroupGuard(verifier=verifier, gate=gate))
                self._subject = Subject(
                    engine=self._subject.engine,
                    engine_version=self._subject.engine_version,
                    rank=self._subject.rank,
                    device=str(group.device),
                )
            self._spaces.append(space)
            self._guards.extend(space.guards)
            self._workers.append(
                SpaceWorker(
                    space,
                    self._reporter,
                    breathe=self._breathe,
                    launch_bytes=lambda: self._scrubber.launch_bytes,
                    monotonic=self._clock.monotonic,
                )
            )
        self._gates.append(gate)
        self._uncovered += uncovered
        self._scrubber.set_budget(self._settings.budget, max(bandwidth, self._scrubber.read_bandwidth))
        if self._enabled:
            self._state, self._reason = "running", None
            gate.open()
        self._publisher.survey()
        self._snapshot = self._build()

    def _let_go(self, gate: EngineGate) -> None:
        self._scrubber.interrupt()
        self._spaces[:] = [space for space in self._spaces if space.gate is not gate]
        self._guards[:] = [guard for guard in self._guards if guard.gate is not gate]
        self._workers[:] = [worker for worker in self._workers if worker.space.gate is not gate]
        if gate in self._gates:
            self._gates.remove(gate)
        self._scrubber.drop_background()
        if not self._guards and self._enabled:
            self._state, self._reason = "waiting", "no pool is attached"
        self._snapshot = self._build()

    def _build(self) -> Snapshot:
        return self._publisher.build(
            subject=self._subject,
            settings=self._settings,
            state=self._state,
            reason=self._reason,
            enabled=self._enabled,
            url=self._url,
            uncovered=self._uncovered,
        )

    def _breathe(self) -> None:
        """Lets go of the GIL when we have held it for long: an engine thread that waits for it gets it now."""
        if time.perf_counter() - self._piece_started > PIECE_SECONDS:
            time.sleep(NAP_SECONDS)
            self._piece_started = time.perf_counter()

    @contextmanager
    def _component(self, name: str, guards: Sequence[GroupGuard]) -> Iterator[None]:
        """A failure in here is counted and switches off the groups it concerns; the thread goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - fails open
            self._failed(name, error)
            for guard in guards:
                guard.switch(False, f"{name} failed: {type(error).__name__}: {error}")

    def _failed(self, component: str, error: BaseException) -> None:
        if self._errors.count(component, f"{type(error).__name__}: {error}"):
            logger.error("canary %s failed: %s", component, error, exc_info=error)

    def _die(self, error: BaseException) -> None:
        logger.critical("the canary thread gives up after %d failures in a row: %s", FAILURES_IN_A_ROW, error)
        self._end("failed", f"gave up after {FAILURES_IN_A_ROW} failures in a row, the last: {error}")

    def _end(self, state: SidecarState, reason: str) -> None:
        for gate in self._gates:
            gate.close()
        self._state, self._reason = state, reason
        self._snapshot = self._build()
        self._incidents.close()
        refusal = ConflictError(f"the canary thread has ended: {reason}")
        try:
            while True:
                if (call := self._commands.get_nowait()) is not None:
                    call[1].set_exception(refusal)
        except queue.Empty:
            return


def _settle(action: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(action())
    except Exception as error:  # noqa: BLE001 - belongs to whoever asked
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
