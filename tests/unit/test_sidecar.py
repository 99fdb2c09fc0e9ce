"""The sidecar from outside: commands, failures, reactions, the way in and out. The test plays the engine."""

from __future__ import annotations

import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from builders.harness import make_group, make_memory
from kv_canary import Budget, CanaryMismatchError, Settings, SettingsError
from kv_canary.commands import PatchSettings, RequestDrill, RequestSweep, SetEnabled, SetGroupEnabled
from kv_canary.errors import ConflictError, ForbiddenError, NotFoundError
from kv_canary.gate import EngineGate
from kv_canary.ledger import HostLedger
from kv_canary.sidecar import Sidecar


class Desk:
    """A guarded pool of 16 sealed pages; `step` is what the engine's thread does between two steps."""

    def __init__(self, **settings: Any) -> None:
        self.memory = make_memory(16)
        self.ledger = HostLedger("full", 16)
        self.gate = EngineGate()
        self.quarantined: list[int] = []
        self.sidecar = Sidecar(
            Settings(**{"budget": Budget(share=1.0), "port": 0, **settings}), engine="test", engine_version="0", seed=0
        )
        self.sidecar.start()
        self.sidecar.attach(self.gate, [(self.ledger, [make_group(self.memory)])])
        self.step()
        self.sidecar.settle()

    def resync(self) -> None:
        self.ledger.reset()
        self.ledger.adopt(range(16), 7, "owner")

    def quarantine(self, space: str, page: int) -> str:
        self.quarantined.append(page)
        return f"page {page} of {space} taken out"

    def step(self) -> None:
        self.gate.boundary(self)
        if self.gate.recording:
            self.ledger.step()

    def flip(self, page: int) -> None:
        self.memory[page, 3] ^= 1

    @property
    def group(self) -> Any:
        return self.sidecar.snapshot().groups[0]

    def do(self, command: Any) -> Any:
        return self.sidecar.submit(command).result(5)


@pytest.fixture
def desk():
    desks: list[Desk] = []

    def make(**settings: Any) -> Desk:
        desks.append(Desk(**settings))
        return desks[-1]

    yield make
    for one in desks:
        one.sidecar.detach()


def wait_until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time limit"
        time.sleep(0.002)


def test_attached_pages_are_adopted_and_swept(desk) -> None:
    one = desk()
    wait_until(lambda: one.group.counters.sweeps["clean"] > 2)
    assert one.group.pages["sealed"] == 16
    assert one.sidecar.snapshot().state == "running"


def test_a_mismatch_becomes_one_incident_with_all_that_a_person_needs(desk) -> None:
    one = desk()
    wait_until(lambda: one.group.counters.verified_pages > 16)
    one.flip(5)
    wait_until(lambda: one.sidecar.snapshot().incidents_total == 1)
    sweeps = one.group.counters.sweeps["mismatch"]
    wait_until(lambda: one.group.counters.sweeps["mismatch"] > sweeps + 3)
    (incident,) = one.sidecar.snapshot().incidents
    assert (incident.page, incident.check, incident.owner, incident.layers) == (5, "content", "owner", (0,))
    assert incident.last_good_at <= incident.found_at
    assert dict(one.group.counters.mismatches) == {("content", "persistent", "real"): 1}


def test_a_patch_changes_the_settings_or_nothing_at_all(desk) -> None:
    one = desk()
    one.do(PatchSettings(changes={"budget": "5MB/s", "sweep_deadline": 5}))
    assert str(one.sidecar.snapshot().settings.budget) == "5MB/s"
    assert one.sidecar.snapshot().budget_bytes_per_second == 5e6
    with pytest.raises(SettingsError, match="sweep_deadline"):
        one.do(PatchSettings(changes={"budget": "1MB/s", "sweep_deadline": 0}))
    assert str(one.sidecar.snapshot().settings.budget) == "5MB/s"
    with pytest.raises(SettingsError, match="only these can change"):
        one.do(PatchSettings(changes={"port": 1}))


def test_a_budget_that_cannot_meet_the_deadline_is_said(desk, caplog) -> None:
    """In the status, by the group, and in one log line."""
    one = desk(budget=Budget(bytes_per_second=1000.0), sweep_deadline=1.0)
    one.sidecar.settle()
    assert "needs" in one.sidecar.snapshot().warnings[0]
    assert not one.group.sweep.deadline_met
    tick = one.sidecar.snapshot().tick_at
    wait_until(lambda: one.sidecar.snapshot().tick_at > tick + 1)
    assert sum("misses its sweep deadline" in record.getMessage() for record in caplog.records) == 1


def test_unknown_groups_are_refused_with_the_known_ones(desk) -> None:
    one = desk()
    for command in (
        SetGroupEnabled(group="nope", enabled=False),
        RequestSweep(group="nope"),
        RequestDrill(kind="fingerprint", group="nope"),
    ):
        with pytest.raises(NotFoundError, match="'nope'; groups: full"):
            one.do(command)


def test_a_group_that_is_off_is_not_read_and_says_why(desk) -> None:
    one = desk()
    one.do(SetGroupEnabled(group="full", enabled=False))
    read = dict(one.group.counters.read_bytes)
    one.flip(3)
    one.sidecar.settle()
    assert dict(one.group.counters.read_bytes) == read
    assert (one.group.enabled, one.group.disabled_reason) == (False, "switched off by a person")
    with pytest.raises(ConflictError):
        one.do(RequestSweep())


def test_switched_off_sweeps_and_drills_are_refused(desk) -> None:
    one = desk()
    one.do(SetEnabled(enabled=False))
    for command in (RequestSweep(), RequestDrill(kind="fingerprint")):
        with pytest.raises(ConflictError, match="switched off"):
            one.do(command)
    assert one.sidecar.snapshot().state == "disabled"


def test_content_drills_are_refused_unless_allowed(desk) -> None:
    with pytest.raises(ForbiddenError):
        desk().do(RequestDrill(kind="content"))


def test_the_answer_to_a_drill_and_a_sweep_is_in_the_snapshot_at_once(desk) -> None:
    one = desk()
    drill, sweep = one.do(RequestDrill(kind="fingerprint")), one.do(RequestSweep())
    assert drill.id in {d.id for d in one.sidecar.snapshot().drills}
    assert sweep.id in {s.id for s in one.sidecar.snapshot().sweeps}


def test_an_alert_drill_counts_as_a_drill_and_an_automatic_one_leaves_no_incident(desk) -> None:
    one = desk()
    wait_until(lambda: one.sidecar.snapshot().drills_total[("fingerprint", "detected")] == 1)  # the one at attach
    assert one.sidecar.snapshot().incidents == ()
    one.do(RequestDrill(kind="fingerprint", alert=True))
    wait_until(lambda: one.sidecar.snapshot().incidents_total == 1)
    assert list(one.group.counters.mismatches) == [("content", "persistent", "drill")]


def test_quarantine_happens_on_the_engines_thread_and_the_incident_says_so(desk) -> None:
    one = desk(on_mismatch="quarantine")
    one.flip(7)
    wait_until(lambda: one.sidecar.snapshot().incidents_total == 1)
    assert one.quarantined == []
    one.step()
    wait_until(lambda: one.sidecar.snapshot().incidents[0].reaction == "page 7 of full taken out")


def test_raise_raises_once_at_the_next_step(desk) -> None:
    one = desk(on_mismatch="raise")
    one.flip(7)
    wait_until(lambda: one.sidecar.snapshot().incidents_total == 1)
    with pytest.raises(CanaryMismatchError, match="page 7"):
        one.step()
    one.step()


def test_a_failing_ledger_switches_its_group_off_and_the_thread_goes_on(desk, monkeypatch: pytest.MonkeyPatch) -> None:
    one = desk()

    def broken(**_: Any) -> bool:
        raise OSError("made to fail")

    monkeypatch.setattr(one.ledger, "catch_up", broken)
    wait_until(lambda: not one.group.enabled)
    assert "made to fail" in one.group.disabled_reason
    assert one.sidecar.is_alive
    assert one.sidecar.snapshot().errors["ledger"] >= 1


def test_a_group_that_cannot_be_read_is_switched_off_alone(desk, monkeypatch: pytest.MonkeyPatch) -> None:
    one = desk()

    def broken(*_: Any) -> Any:
        raise OSError("made to fail")

    monkeypatch.setattr(one.sidecar._canary._guards[0].verifier.table, "verify", broken)
    wait_until(lambda: not one.group.enabled)
    assert one.group.disabled_reason == "scrubber failed: OSError: made to fail"
    assert one.sidecar.is_alive
    assert one.sidecar.snapshot().state == "running"


def test_the_same_failure_is_logged_once(desk, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    one = desk()

    def broken(report: Any) -> int:
        raise OSError("made to fail")

    monkeypatch.setattr(one.sidecar._canary._scrubber, "advance", broken)
    wait_until(lambda: one.sidecar.snapshot().errors.get("scrubber", 0) > 3)
    assert sum("made to fail" in record.getMessage() for record in caplog.records) == 1


def test_a_thread_that_cannot_go_on_gives_up_loudly_and_closes_the_gate(
    desk, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    one = desk()

    def broken() -> float:
        raise OSError("made to fail")

    monkeypatch.setattr("kv_canary.sidecar.TICK_SECONDS", 0.0)
    monkeypatch.setattr(one.sidecar._canary, "tick", broken)
    wait_until(lambda: not one.sidecar.is_alive)
    assert one.sidecar.snapshot().state == "failed"
    assert not one.gate.recording
    assert any(record.levelno == logging.CRITICAL for record in caplog.records)
    with pytest.raises(ConflictError, match="has ended"):
        one.do(RequestSweep())


def test_a_failed_hook_is_counted_and_the_switch_brings_the_guard_back(desk) -> None:
    one = desk()
    one.gate.fail("seal", ValueError("made to fail"))
    wait_until(lambda: not one.group.enabled)
    assert one.group.disabled_reason == "hook seal failed: ValueError: made to fail"
    assert one.sidecar.snapshot().errors == {"hook": 1}
    one.do(SetEnabled(enabled=True))
    one.step()
    wait_until(lambda: one.group.enabled and one.group.pages["sealed"] == 16)
    one.flip(2)
    wait_until(lambda: one.sidecar.snapshot().incidents_total == 1)


def test_lost_events_lead_to_a_new_look_at_the_engines_tables(desk, monkeypatch: pytest.MonkeyPatch) -> None:
    one = desk()
    one.ledger._overrun = True
    wait_until(lambda: one.sidecar.snapshot().errors.get("ledger") == 1)
    assert not one.gate.recording
    one.step()
    wait_until(lambda: one.group.pages["sealed"] == 16)
    assert one.sidecar.snapshot().incidents == ()


def test_an_incident_log_that_cannot_be_written_is_counted_and_nothing_is_lost(desk, tmp_path: Path) -> None:
    one = desk(incident_log=tmp_path / "missing" / "incidents.jsonl")
    one.flip(1)
    wait_until(lambda: one.sidecar.snapshot().incidents_total == 1)
    wait_until(lambda: one.sidecar.snapshot().errors.get("incident_log") == 1)


def test_detach_ends_the_thread_and_frees_the_memory(desk) -> None:
    import gc
    import weakref

    one = desk()
    gone = weakref.ref(one.memory)
    one.sidecar.release(one.gate)
    one.sidecar.detach()
    one.sidecar.detach()
    assert not one.sidecar.is_alive
    assert one.sidecar.snapshot().state == "stopped"
    del one.memory
    gc.collect()
    assert gone() is None


def test_no_thread_of_ours_is_left_after_detach(desk) -> None:
    before = set(threading.enumerate())
    one = desk()
    one.sidecar.serve()
    one.sidecar.detach()
    wait_until(lambda: not set(threading.enumerate()) - before)


def test_a_busy_port_is_said_and_the_next_free_one_is_taken(desk, caplog) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        one = desk(port=port)
        one.sidecar.serve()
        one.sidecar.settle()
        url = one.sidecar.snapshot().url
    assert url is not None
    assert port < int(url.rsplit(":", 1)[1]) < port + 20
    assert any(f"port {port} is in use" in record.getMessage() for record in caplog.records)
    assert f"port {port} is in use" in one.sidecar.snapshot().warnings[0]


def test_without_a_port_the_guard_goes_on(desk) -> None:
    one = desk(host="203.0.113.1")
    one.sidecar.serve()
    wait_until(lambda: one.sidecar.snapshot().errors.get("http") == 1)
    assert one.sidecar.snapshot().url is None
    wait_until(lambda: "there is no HTTP API" in " ".join(one.sidecar.snapshot().warnings))
    one.flip(1)
    wait_until(lambda: one.sidecar.snapshot().incidents_total == 1)


def test_an_unreadable_token_file_is_refused_at_start(desk, tmp_path: Path) -> None:
    one = desk(token_file=tmp_path / "missing")
    with pytest.raises(SettingsError, match=r"(?i)token_file"):
        one.sidecar.serve()


def test_two_groups_over_one_ledger_are_counted_apart() -> None:
    memory = torch.cat([make_memory(16), make_memory(16, seed=1)], dim=1)
    whole = make_group(memory, layers=4)
    halves = [
        type(whole)(name=name, kind="full", pages=16, stripes=stripes)
        for name, stripes in (("left", whole.stripes[:2]), ("right", whole.stripes[2:]))
    ]
    ledger, gate = HostLedger("blocks", 16), EngineGate()
    sidecar = Sidecar(Settings(budget=Budget(share=1.0)), engine="test", engine_version="0")
    sidecar.start()
    try:
        sidecar.attach(gate, [(ledger, halves)])

        class Port:
            def resync(self) -> None:
                ledger.reset()
                ledger.adopt(range(16))

            def quarantine(self, space: str, page: int) -> str:
                return ""

        gate.boundary(Port())
        wait_until(lambda: all(g.counters.verified_pages > 16 for g in sidecar.snapshot().groups))
        memory[3, 20_000 % memory.shape[1]] ^= 1
        wait_until(lambda: sidecar.snapshot().incidents_total == 1)
        assert sidecar.snapshot().incidents[0].group == "left" if 20_000 % memory.shape[1] < 8192 else "right"
    finally:
        sidecar.detach()
