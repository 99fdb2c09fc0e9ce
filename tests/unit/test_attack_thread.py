"""The canary thread and what it leans on are made to fail: it ends loudly or goes on; nobody waits in vain."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest

from builders.guarded_pool import guarded_pool, wait_for
from builders.snapshots import make_incident
from kv_canary.canary import Canary
from kv_canary.clock import SystemClock
from kv_canary.commands import RequestSweep, SetEnabled
from kv_canary.errors import ConflictError
from kv_canary.http.probes import TICK_LIMIT_SECONDS, why_not_healthy
from kv_canary.incidents import IncidentLog
from kv_canary.publisher import Publisher
from kv_canary.sidecar import Sidecar


def get(sidecar: Sidecar, path: str) -> httpx.Response:
    return httpx.get(f"{sidecar.snapshot().url}{path}", trust_env=False, timeout=20)


def mismatch_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


# The thread


class Killed(BaseException):
    """What nobody catches: a SystemExit that was thrown into the thread, a KeyboardInterrupt."""


def storm(monkeypatch: pytest.MonkeyPatch, error: type[BaseException], where: str) -> None:
    """From now on, `where` of the canary thread raises, with another text every time."""
    count = iter(range(10**9))

    def fail(*args: Any, **options: Any) -> Any:
        raise error(f"made to fail, number {next(count)}")

    monkeypatch.setattr("kv_canary.sidecar.TICK_SECONDS", 0.001)
    monkeypatch.setattr(Canary if where == "tick" else Publisher, where, fail)


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (RuntimeError, "tick"),
        (MemoryError, "build"),  # so that not even a last snapshot can be built
        (SystemExit, "tick"),
        (Killed, "tick"),
        (Killed, "build"),
    ],
)
def test_a_thread_that_ends_says_so_everywhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type[BaseException], where: str
) -> None:
    """Status, health, readiness and metrics; gates are closed, commands refused, and the log is not flooded."""
    with guarded_pool(served=True) as (sidecar, engine):
        sidecar.settle()
        wait_for(lambda: engine.gate.recording)
        storm(monkeypatch, error, where)
        wait_for(lambda: not sidecar.is_alive)
        assert not engine.gate.recording
        health, ready = get(sidecar, "/healthz"), get(sidecar, "/readyz")
        assert (health.status_code, ready.status_code) == (503, 503)
        assert "made to fail" in health.json()["detail"]
        status = get(sidecar, "/v1/status").json()
        assert (status["state"], status["enabled"]) == ("failed", False)
        assert 'kv_canary_enabled{group="full"} 0.0' in get(sidecar, "/metrics").text
        write = httpx.put(f"{sidecar.snapshot().url}/v1/canary", json={"enabled": True}, trust_env=False)
        assert write.status_code == 409
        assert "has ended" in write.json()["detail"]
        steps = engine.steps
        wait_for(lambda: engine.steps > steps + 20)
    assert len([line for line in mismatch_lines(caplog) if "made to fail" in line]) <= 20


def test_whoever_asks_while_the_thread_ends_gets_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """No command is left without an answer, whether it came before the end, in the middle or after."""
    with guarded_pool(traffic=False) as (sidecar, _):
        storm(monkeypatch, Killed, "tick")
        futures = [sidecar.submit(RequestSweep())]
        while sidecar.is_alive:
            futures.append(sidecar.submit(RequestSweep()))
            futures[-1].exception(10)
        futures.append(sidecar.submit(RequestSweep()))
        for future in futures:
            assert isinstance(future.exception(10), ConflictError | None)
        assert isinstance(futures[-1].exception(0), ConflictError)


def test_a_flood_of_commands_does_not_keep_the_thread_from_its_work() -> None:
    """However fast they come, it ticks between them."""
    with guarded_pool(traffic=False) as (sidecar, _):
        wait_for(lambda: sidecar.settle().groups[0].counters.verified_pages > 100)
        verified = sidecar.snapshot().groups[0].counters.verified_pages

        def again() -> None:  # a call that brings the next one: the queue is never empty
            sidecar._calls.put((again, Future(), False))

        sidecar._call(again)
        wait_for(lambda: sidecar.snapshot().groups[0].counters.verified_pages > verified + 100)


def test_a_command_that_would_end_the_thread_is_its_askers_alone() -> None:
    with guarded_pool(traffic=False) as (sidecar, _):

        def leave() -> None:
            raise SystemExit(3)

        assert isinstance(sidecar._call(leave).exception(10), SystemExit)
        sidecar.submit(SetEnabled(enabled=False)).result(10)
        assert sidecar.is_alive


def test_after_a_thread_died_the_same_process_is_guarded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Detached, nothing of the dead one is left in the way of the next; the pool it held is let go of."""
    with guarded_pool(served=True) as (sidecar, engine):
        sidecar.settle()
        with monkeypatch.context() as patch:
            storm(patch, Killed, "tick")
            wait_for(lambda: not sidecar.is_alive)
        sidecar.release(engine.gate)
        assert sidecar.snapshot().groups == ()
        sidecar.detach()
        with guarded_pool(served=True) as (again, engine_again):
            again.settle()
            assert get(again, "/healthz").status_code == 200
            wait_for(lambda: engine_again.held)
            with engine_again.between_steps():
                again.settle()
                engine_again.memory[engine_again.held[0], 5] ^= 4
                wait_for(lambda: again.snapshot().incidents_total == 1)


def test_failures_with_a_new_text_each_time_do_not_flood_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with guarded_pool(traffic=False) as (sidecar, _):
        for number in range(1000):
            sidecar.note_error("adapter", ValueError(f"page {number}"))
        assert sidecar.settle().errors == {"adapter": 1000}
    assert len([line for line in mismatch_lines(caplog) if "page" in line]) == 8 + 6  # and 16, 32, ... 512


# Clocks


class JumpingClock(SystemClock):
    """The wall clock is set by hours, the other one is not."""

    def __init__(self) -> None:
        self.offset = 0.0

    def time(self) -> float:  # type: ignore[override]
        return time.time() + self.offset


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_wall_clock_that_is_set_changes_no_age_and_no_verdict(hours: int) -> None:
    """Ages, deadlines, health and drills go by the clock that nobody sets; dates are those of the day."""
    clock = JumpingClock()
    with guarded_pool(traffic=False, clock=clock, drill_interval=1.0) as (sidecar, engine):
        wait_for(lambda: sidecar.settle().groups[0].counters.verified_pages > 100)
        clock.offset = hours * 3600.0
        assert why_not_healthy(sidecar.snapshot(), clock.monotonic()) is None
        drilled = sum(sidecar.snapshot().drills_total.values())
        wait_for(lambda: sum(sidecar.snapshot().drills_total.values()) > drilled)
        group = sidecar.settle().groups[0]
        assert group.oldest_verification_age_seconds < 60
        assert group.sweep.deadline_met
        sweep = sidecar.submit(RequestSweep()).result(10)
        wait_for(lambda: next(s for s in sidecar.settle().sweeps if s.id == sweep.id).state == "finished")
        engine.memory[3, 3] ^= 1
        wait_for(lambda: sidecar.settle().incidents_total == 1)
        incident = sidecar.snapshot().incidents[-1]
    now = clock.time()
    assert abs(incident.found_at - now) < 60
    assert incident.last_good_at is not None
    assert 0 <= incident.found_at - incident.last_good_at < 60


def test_a_dead_thread_is_not_hidden_by_a_clock_that_was_set_back() -> None:
    with guarded_pool(traffic=False) as (sidecar, _):
        snapshot = sidecar.settle()
    reason = why_not_healthy(snapshot, snapshot.tick_monotonic + TICK_LIMIT_SECONDS + 1)
    assert reason is not None
    assert "last ticked 11.0 s ago" in reason


# The incident log


def lines(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines() if line]


@pytest.mark.parametrize("way", ["removed", "moved away"])
def test_an_incident_log_that_is_gone_is_begun_anew(tmp_path: Path, way: str) -> None:
    """Somebody's log rotation, or a person who tidies up: what comes later is not written into nowhere."""
    path = tmp_path / "incidents.jsonl"
    log = IncidentLog(10, path=path)
    log.add(make_incident(1))
    path.unlink() if way == "removed" else path.rename(tmp_path / "incidents.jsonl.old")
    log.add(make_incident(2))
    log.close()
    assert lines(path) == ["incident-2"]


def test_a_disk_that_fills_up_leaves_whole_lines_once_there_is_room_again(tmp_path: Path) -> None:
    """In a process of its own, whose files may not grow over a limit: half a line is ended before the next one."""
    path = tmp_path / "incidents.jsonl"
    program = f"""
import resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from builders.snapshots import make_incident
from kv_canary.incidents import IncidentLog
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
errors = []
log = IncidentLog(100, path=Path({str(path)!r}), on_error=errors.append)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
for number in range(50):
    log.add(make_incident(number))
assert 40 < len(errors) < 50, errors
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.add(make_incident(99))
log.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    written = path.read_text().splitlines()
    assert json.loads(written[-1])["id"] == "incident-99"
    assert sum(not _is_json(line) for line in written if line) <= 1  # the one that the disk had no room for


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("kind", ["full disk", "folder", "no folder"])
def test_an_incident_log_that_cannot_be_written_is_counted_and_logged_once(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = {"full disk": Path("/dev/full"), "folder": tmp_path, "no folder": tmp_path / "none" / "log"}[kind]
    with guarded_pool(traffic=False, incident_log=path) as (sidecar, engine):
        wait_for(lambda: sidecar.settle().groups[0].counters.verified_pages > 200)
        for page in range(0, 40, 2):
            engine.memory[page, page] ^= 1
            wait_for(lambda n=page: _wrong_pages(sidecar) > n // 2)
        snapshot = sidecar.settle()
    assert snapshot.errors["incident_log"] >= 1
    assert len([line for line in mismatch_lines(caplog) if "incident_log" in line]) == 1


def _wrong_pages(sidecar: Sidecar) -> int:
    return sidecar.settle().groups[0].counters.mismatches.get(("free_page", "persistent", "real"), 0)


# Ports


def test_when_no_port_can_be_had_the_guard_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All ports of the range are taken: said in the status and once in the log; the engine is guarded all the same."""
    taken: list[socket.socket] = []
    base = 0
    while len(taken) < 20:
        for one in taken:
            one.close()
        taken.clear()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            base = probe.getsockname()[1]
        for port in range(base, min(base + 20, 65536)):
            try:
                taken.append(socket.create_server(("127.0.0.1", port), reuse_port=False))
            except OSError:
                break
    try:
        with guarded_pool(traffic=False, served=True, port=base) as (sidecar, engine):
            snapshot = sidecar.settle()
            assert snapshot.url is None
            assert snapshot.errors == {"http": 1}
            assert any(f"ports {base} to {base + 19}" in warning for warning in snapshot.warnings)
            wait_for(lambda: sidecar.settle().groups[0].counters.verified_pages > 100)
            engine.memory[3, 3] ^= 1
            wait_for(lambda: sidecar.settle().incidents_total == 1)
    finally:
        for one in taken:
            one.close()
    assert len([line for line in mismatch_lines(caplog) if "all in use" in line]) == 1


def test_a_host_that_cannot_be_bound_is_said_and_the_guard_goes_on() -> None:
    with guarded_pool(traffic=False, served=True, host="192.0.2.1", port=10470) as (sidecar, _):
        snapshot = sidecar.settle()
        assert snapshot.url is None
        assert any("KV_CANARY_HOST" in warning for warning in snapshot.warnings)
        wait_for(lambda: sidecar.settle().groups[0].counters.verified_pages > 100)
