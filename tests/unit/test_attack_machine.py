"""A random person at the controls, a random fault now and then, and an engine that goes on: no false alarm, no missed
fault, and a snapshot that adds up at every moment.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from builders.guarded_pool import PAGES, Engine, attack_settings, wait_for
from kv_canary.commands import PatchSettings, RequestDrill, RequestSweep, SetEnabled, SetGroupEnabled
from kv_canary.errors import CommandError
from kv_canary.sidecar import Sidecar

EXAMPLES = int(os.environ.get("KV_CANARY_MACHINE_EXAMPLES", "12"))
COUNTERS = ("verified_pages", "sealed_pages", "claims", "superseded")


class Controls(RuleBasedStateMachine):
    """One sidecar for all its life, engines that come and go, and a book of the faults that were injected."""

    def __init__(self) -> None:
        super().__init__()
        self.sidecar = Sidecar(attack_settings(), engine="test", engine_version="0", seed=0)
        self.sidecar.start()
        self.engine: Engine | None = None
        self.found = 0  # real incidents that there have to be
        self.counters: dict[str, int] = {}
        self.totals: dict[Any, int] = {}
        self.enabled = self.group_enabled = True
        self.attach()

    def teardown(self) -> None:
        try:
            if self.engine is not None:
                self.engine.stop()
        finally:
            self.sidecar.detach()
        assert not self.sidecar.is_alive

    def do(self, command: Any) -> Any:
        return self.sidecar.submit(command).result(20)

    # Engines that come and go

    @precondition(lambda self: self.engine is None)
    @rule()
    def attach(self) -> None:
        self.engine = Engine()
        self.group_enabled = True
        self.counters = {}
        self.sidecar.attach(self.engine.gate, [(self.engine.ledger, [self.engine.group])])
        self.engine.start()

    @precondition(lambda self: self.engine is not None)
    @rule(engine_first=st.booleans())
    def detach(self, engine_first: bool) -> None:
        """In the middle of whatever is going on; an engine may go before or after its guard."""
        if engine_first:
            self.engine.stop()
        self.sidecar.release(self.engine.gate)
        assert not self.engine.gate.recording
        self.engine.stop()
        self.engine = None

    # A person at the controls

    @rule(enabled=st.booleans())
    def switch(self, enabled: bool) -> None:
        self.do(SetEnabled(enabled=enabled))
        self.enabled = enabled

    @precondition(lambda self: self.engine is not None)
    @rule(enabled=st.booleans())
    def switch_group(self, enabled: bool) -> None:
        self.do(SetGroupEnabled(group="full", enabled=enabled))
        self.group_enabled = enabled

    @rule(
        changes=st.dictionaries(st.sampled_from(["sweep_deadline", "drill_interval"]), st.floats(1, 100), max_size=2),
        budget=st.sampled_from(["off", "1%", "100%", "10MB/s"]),
        on_mismatch=st.sampled_from(["log", "quarantine"]),
    )
    def patch(self, changes: dict[str, float], budget: str, on_mismatch: str) -> None:
        self.do(PatchSettings(changes={**changes, "budget": budget, "on_mismatch": on_mismatch}))

    @rule()
    def sweep(self) -> None:
        with suppress(CommandError):  # refused: nothing is on
            self.do(RequestSweep())

    @rule(kind=st.sampled_from(["fingerprint", "content"]), alert=st.booleans())
    def drill(self, kind: Any, alert: bool) -> None:
        with suppress(CommandError):
            self.do(RequestDrill(kind=kind, alert=alert))

    @precondition(lambda self: self.engine is not None)
    @rule()
    def let_the_engine_work(self) -> None:
        steps = self.engine.steps
        wait_for(lambda: self.engine.steps > steps + 10)

    # Faults

    @precondition(lambda self: self.engine is not None and self.enabled and self.group_enabled)
    @rule(free=st.booleans(), byte=st.integers(0, 8191), bit=st.integers(0, 7), place=st.integers(0, PAGES - 1))
    def flip_a_bit(self, free: bool, byte: int, bit: int, place: int) -> None:
        """Found on its page, whatever the controls were set to; and it was whole before, so it is made whole again."""
        wait_for(lambda: self.engine.gate.recording)
        wait_for(lambda: self.engine.held)
        with self.engine.between_steps():
            guard = self.sidecar._canary._guards[0]
            wait_for(lambda: self.sidecar.settle().groups[0].pages["unknown"] == 0 and guard.adopting is None)
            pages = self.engine.free if free and self.engine.free else self.engine.held
            known = set(guard.verifier.select(0, PAGES).tolist())
            pages = [page for page in pages if page in known]
            page = pages[place % len(pages)]  # how many there are is the engine's, so it is no choice of hypothesis
            drills_over = lambda: all(drill.result != "running" for drill in self.sidecar.settle().drills)  # noqa: E731
            wait_for(drills_over)  # a content drill puts its byte back
            self.engine.memory[page, byte] ^= 1 << bit
            self.found += 1
            self.do(RequestSweep(group="full"))
            wait_for(lambda: self.real() == self.found, 30, f"page {page} is found")
            incident = [one for one in self.sidecar.snapshot().incidents if one.source == "real"][-1]
            assert page in (incident.page, *incident.neighbours)
            assert incident.check == ("free_page" if page in self.engine.free else "content")
            # mended between the two reads of a verification it would be a difference that did not repeat
            assert self.sidecar.suspend("a test mends a byte", 30)
            self.engine.memory[page, byte] ^= 1 << bit
            self.sidecar.resume("a test mends a byte")

    def real(self) -> int:
        """Real mismatches of all engines so far: pages, for those that went bad alike may share an incident."""
        return sum(len({one.page, *one.neighbours}) for one in self.sidecar.settle().incidents if one.source == "real")

    # What always holds

    @invariant()
    def no_false_alarm_and_nothing_failed(self) -> None:
        snapshot = self.sidecar.snapshot()
        assert snapshot.errors == {}
        assert sum(1 for one in snapshot.incidents if one.source == "real") <= self.found
        assert all(result != "missed" or not count for (_, result), count in snapshot.drills_total.items())

    @invariant()
    def counters_never_go_down(self) -> None:
        snapshot = self.sidecar.snapshot()
        totals = {**snapshot.drills_total, "incidents": snapshot.incidents_total}
        assert all(totals[key] >= value for key, value in self.totals.items())
        self.totals = totals
        for group in snapshot.groups:
            now = {name: getattr(group.counters, name) for name in COUNTERS}
            now |= dict(group.counters.read_bytes) | dict(group.counters.sweeps) | {**group.counters.mismatches}
            assert all(now[key] >= value for key, value in self.counters.items())
            self.counters = now

    @invariant()
    def the_snapshot_adds_up(self) -> None:
        snapshot = self.sidecar.snapshot()
        assert snapshot.enabled == self.enabled
        assert len(snapshot.groups) == (self.engine is not None)
        assert snapshot.incidents_total >= len(snapshot.incidents)
        ids = [one.id for one in snapshot.incidents]
        assert ids == sorted(set(ids))
        for group in snapshot.groups:
            assert sum(group.pages.values()) == group.total_pages == PAGES
            assert group.enabled == self.group_enabled
            assert 0 <= group.sweep.position <= group.sweep.total
            assert group.oldest_verification_age_seconds >= 0
        for sweep in snapshot.sweeps:
            assert 0 <= sweep.progress <= 1
            assert (sweep.finished_at is None) == (sweep.state == "running")


def test_whatever_a_person_does_while_the_engine_serves() -> None:
    """`KV_CANARY_MACHINE_EXAMPLES=300` is the long form."""
    run_state_machine_as_test(
        Controls,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
