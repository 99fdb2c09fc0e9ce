"""What the canary thread owns and does: one tick after another, and the commands between them.

Everything here runs on the canary thread (or on its caller's, as long as that thread has not been started). The only
thing that others read is `snapshot`, which is replaced as a whole.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from kv_canary.clock import Clock
from kv_canary.commands import (
    Command,
    Look,
    LookAtPage,
    MapPages,
    PatchSettings,
    RequestDrill,
    RequestSweep,
    SetEnabled,
    SetGroupEnabled,
)
from kv_canary.drills import Drills
from kv_canary.errors import ConflictError, KVCanaryError, NotFoundError
from kv_canary.fingerprint.table import FingerprintTable
from kv_canary.gate import EngineGate
from kv_canary.geometry import CanaryGroup
from kv_canary.guard import GroupGuard, Space
from kv_canary.incidents import IncidentLog
from kv_canary.ledger import Ledger
from kv_canary.page_map import PageMapper
from kv_canary.publisher import Errors, Publisher, Subject
from kv_canary.reporter import Reporter
from kv_canary.scrubber import Scrubber
from kv_canary.settings import Settings
from kv_canary.snapshot import PageDetails, PageMap, SidecarState, Snapshot, UncoveredBuffer
from kv_canary.suspension import Suspension
from kv_canary.verifier import Verifier
from kv_canary.worker import SpaceWorker

logger = logging.getLogger("kv_canary")

TICK_SECONDS = 0.05
PUBLISH_SECONDS = 0.25
SETTLE_SECONDS = 5.0
PIECE_SECONDS = 100e-6  # Python work between two releases of the GIL
NAP_SECONDS = 50e-6

PreparedPool = tuple[Ledger, Sequence[tuple[CanaryGroup, FingerprintTable, FingerprintTable | None]]]


class Canary:
    """Spaces and groups under guard, and the instruments that work on them."""

    def __init__(self, settings: Settings, subject: Subject, clock: Clock, *, seed: int | None = None) -> None:
        self.settings = settings
        self.notices: list[str] = []
        self._url: str | None = None
        self._subject = subject
        self._clock = clock
        self._gates: list[EngineGate] = []
        self._spaces: list[Space] = []
        self._guards: list[GroupGuard] = []
        self._workers: list[SpaceWorker] = []
        self._uncovered: dict[EngineGate, tuple[UncoveredBuffer, ...]] = {}
        self._enabled = True
        self._state: SidecarState = "waiting"
        self._reason: str | None = "no pool is attached yet"
        self._errors = Errors()
        self._piece_started = 0.0
        self.suspension = Suspension(monotonic=clock.monotonic, synchronize=self._synchronize)
        self._incidents = IncidentLog(
            settings.incident_capacity,
            path=settings.incident_log,
            maximum_bytes=settings.incident_log_bytes,
            backups=settings.incident_log_backups,
            on_error=lambda error: self.failed("incident_log", error),
        )
        self._reporter = Reporter(
            self._incidents,
            settings=lambda: self.settings,
            time=clock.time,
            monotonic=clock.monotonic,
            guards=self._guards,
            breathe=self._breathe,
        )
        self._scrubber = Scrubber(
            self._guards, budget=settings.budget, read_bandwidth=0.0, monotonic=clock.monotonic, time=clock.time
        )
        self._drills = Drills(
            self._guards, monotonic=clock.monotonic, time=clock.time, random_source=random.Random(seed)
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
            suspension=self.suspension,
            time=clock.time,
            monotonic=clock.monotonic,
            breathe=self._breathe,
        )
        self._mapper = PageMapper(
            incidents=self._incidents, suspension=self.suspension, time=clock.time, breathe=self._breathe
        )
        self._next_publish = 0.0
        self._sweep_count = 0
        self._late: set[str] = set()
        self.snapshot = self._build()

    @property
    def gates(self) -> Sequence[EngineGate]:
        return self._gates

    def reached_at(self, url: str, notice: str | None) -> None:
        """The address at which people find us, and what they should know about it."""
        self._url = url
        if notice is not None:
            self.notices.append(notice)

    def publish_soon(self) -> None:
        """The next tick publishes, whenever the last one was."""
        self._next_publish = 0.0

    def tick(self) -> float:
        """Does what is due, in short pieces; returns the seconds until something is due again."""
        self._piece_started = time.perf_counter()
        for gate in self._gates:
            self._watch(gate)
        backlog = False
        for worker in self._workers:
            with self._component("ledger", partial(list, worker.space.guards)):
                backlog |= worker.run()
        if self._enabled:
            with self._component("drill"), self.suspension.reading() as allowed:
                if allowed:
                    self._drill_if_due()
                    self._drills.run(self._reporter.drill)
            with self._component("scrubber", self._scrubber.swept_now), self.suspension.reading() as allowed:
                if allowed:
                    self._scrubber.advance(self._finding)
        now = self._clock.monotonic()
        if now >= self._next_publish:
            self._reporter.tick()
            self._publisher.survey()
            self.snapshot = self._build()
            self._say_who_is_late()
            self._next_publish = now + PUBLISH_SECONDS
        if self.suspension.reasons:
            return TICK_SECONDS
        if backlog or self._drills.pending:
            return NAP_SECONDS
        return max(NAP_SECONDS, min(TICK_SECONDS, self._scrubber.delay()))

    def _say_who_is_late(self) -> None:
        """One log line when a group begins to miss its sweep deadline, not one a tick."""
        late = {group.name for group in self.snapshot.groups if not group.sweep.deadline_met}
        for name in sorted(late - self._late):
            hint = next((warning for warning in self.snapshot.warnings if "needs" in warning), "")
            logger.warning("group %s misses its sweep deadline of %g s. %s", name, self.settings.sweep_deadline, hint)
        self._late = late

    def settle(self) -> Snapshot:
        """Does all work there is; what cannot be done while reading is suspended stays."""
        until = self._clock.monotonic() + 5.0
        while self._clock.monotonic() < until:
            busy = [worker.run() for worker in self._workers]  # every one of them, so no any() over a generator
            if not any(busy) or self.suspension.reasons:
                break
            self._breathe()
        self._publisher.survey()
        self.snapshot = self._build()
        return self.snapshot

    def _watch(self, gate: EngineGate) -> None:
        for incident, reaction in gate.reactions_done():
            self._incidents.set_reaction(incident, reaction)
            self.publish_soon()
        failure = gate.failure
        if failure is not None:
            component, text = failure
            guards = [guard for guard in self._guards if guard.gate is gate and guard.enabled]
            for guard in guards:
                guard.switch(False, f"hook {component} failed: {text}")
            if guards:
                self._errors.count("hook", f"{component}: {text}")
                self.publish_soon()
        for space in self._spaces:
            if space.gate is gate and gate.recording and space.ledger.overrun:
                self.failed(
                    "ledger", KVCanaryError(f"events of {space.ledger.name} were lost; reading its tables anew")
                )
                gate.close()
                gate.open()

    def _drill_if_due(self) -> None:
        now = self._clock.monotonic()
        if now < self._next_drill:
            return
        ready = [g for g in self._guards if g.active and len(g.verifier.select(0, g.group.pages))]
        if ready:
            guard = ready[int(now) % len(ready)]
            # the engine may have closed its gate since: then there is nothing to prove now
            with suppress(ConflictError):
                self._drills.request(
                    "fingerprint", guard.group.name, automatic=True, alert=False, content_allowed=False
                )
                self._next_drill = now + self.settings.drill_interval

    def _finding(self, guard: GroupGuard, finding: Any) -> bool:
        self.publish_soon()
        return self._reporter.finding(guard, finding)

    def obey(self, command: Command) -> Any:
        if isinstance(command, MapPages | LookAtPage):
            return self.look(command)
        answer: Any = None
        match command:
            case SetEnabled(enabled=enabled):
                self._set_enabled(enabled)
            case SetGroupEnabled(group=name, enabled=enabled):
                guard = self._guard(name)
                if enabled and guard.group.unguarded is not None:
                    raise ConflictError(f"group {name} cannot be switched on: {guard.group.unguarded}")
                if enabled and guard.gate.failure is not None:
                    guard.gate.open()
                guard.switch(enabled, "switched off by a person")
            case PatchSettings(changes=changes):
                self.settings = self.settings.patched(changes)
                self._scrubber.set_budget(self.settings.budget, self._scrubber.read_bandwidth)
                self._next_drill = min(self._next_drill, self._clock.monotonic() + self.settings.drill_interval)
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
                    kind, name, automatic=False, alert=alert, content_allowed=self.settings.allow_content_drills
                )
        self.snapshot = self._build()  # whoever asked finds the outcome in the very next snapshot
        return answer

    def look(self, command: Look) -> PageMap | PageDetails:
        """What a command that changes nothing asks for."""
        self._piece_started = time.perf_counter()
        guard, deadline = self._guard(command.group), self.settings.sweep_deadline
        if isinstance(command, LookAtPage):
            return self._mapper.details(guard, command.page)
        return self._mapper.map(guard, deadline)

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

    def take_over(
        self,
        gate: EngineGate,
        prepared: Sequence[PreparedPool],
        bandwidth: float,
        uncovered: tuple[UncoveredBuffer, ...],
    ) -> None:
        for ledger, tables in prepared:
            space = Space(ledger=ledger, gate=gate)
            for place, (group, table, buffers) in enumerate(tables):
                verifier = Verifier(
                    group,
                    ledger,
                    table,
                    buffers=buffers,
                    place=place,
                    watch=gate.watch,
                    monotonic=self._clock.monotonic,
                )
                space.guards.append(
                    GroupGuard(
                        verifier=verifier,
                        gate=gate,
                        enabled=group.unguarded is None,
                        disabled_reason=group.unguarded,
                    )
                )
                if group.unguarded is not None:
                    logger.warning("group %s is not guarded: %s", group.name, group.unguarded)
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
                    reading=self.suspension.reading,
                    breathe=self._breathe,
                    launch_bytes=lambda: self._scrubber.launch_bytes,
                    monotonic=self._clock.monotonic,
                )
            )
        self._gates.append(gate)
        self._uncovered[gate] = uncovered
        self._scrubber.set_budget(self.settings.budget, max(bandwidth, self._scrubber.read_bandwidth))
        if self._enabled:
            self._state, self._reason = "running", None
            gate.open()
        self._publisher.survey()
        self.snapshot = self._build()

    def let_go(self, gate: EngineGate) -> None:
        self._scrubber.interrupt()
        self._spaces[:] = [space for space in self._spaces if space.gate is not gate]
        self._guards[:] = [guard for guard in self._guards if guard.gate is not gate]
        self._workers[:] = [worker for worker in self._workers if worker.space.gate is not gate]
        if gate in self._gates:
            self._gates.remove(gate)
        self._uncovered.pop(gate, None)
        self._scrubber.drop_background()
        self._mapper.forget()
        if not self._guards and self._enabled:
            self._state, self._reason = "waiting", "no pool is attached"
        self.snapshot = self._build()

    def _synchronize(self) -> None:
        """Has the devices finish what was launched for us."""
        for guard in self._guards:
            guard.verifier.table.synchronize()

    def _build(self) -> Snapshot:
        return self._publisher.build(
            subject=self._subject,
            settings=self.settings,
            state=self._state,
            reason=self._reason,
            enabled=self._enabled,
            url=self._url,
            uncovered=tuple(chain.from_iterable(self._uncovered.values())),
            notices=self.notices,
        )

    def _breathe(self) -> None:
        """Lets go of the GIL when we have held it for long: an engine thread that waits for it gets it now."""
        if time.perf_counter() - self._piece_started > PIECE_SECONDS:
            time.sleep(NAP_SECONDS)
            self._piece_started = time.perf_counter()

    @contextmanager
    def _component(self, name: str, concerned: Callable[[], Sequence[GroupGuard]] = tuple) -> Iterator[None]:
        """A failure in here is counted and switches off the groups that it concerns; the thread goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - fails open
            self.failed(name, error)
            for guard in concerned():
                guard.switch(False, f"{name} failed: {type(error).__name__}: {error}")
            self.publish_soon()

    def failed(self, component: str, error: BaseException) -> None:
        if self._errors.count(component, f"{type(error).__name__}: {error}"):
            logger.error("canary %s failed: %s", component, error, exc_info=error)

    def end(self, state: SidecarState, reason: str) -> None:
        """The last thing that happens: every gate closed, and a last snapshot that says why."""
        for gate in self._gates:
            gate.close()
        self._state, self._reason, self._enabled = state, reason, False
        try:
            self.snapshot = self._build()
        except BaseException as error:  # noqa: BLE001 - perhaps this is what the thread ends for
            self.failed("snapshot", error)
            self.snapshot = replace(self.snapshot, state=state, reason=reason, enabled=False)
        self._incidents.close()

    def after_fork(self) -> None:
        """In a forked child: locks may be held by threads that are not here, so they are made anew."""
        for gate in self._gates:
            gate.after_fork()
        self.suspension.after_fork()
        reason = f"a forked child of {self.snapshot.pid}, which is guarded"
        self.snapshot = replace(self.snapshot, state="stopped", reason=reason, enabled=False, pid=os.getpid())
