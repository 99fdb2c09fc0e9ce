"""The process around the sidecar: forks, the interpreter's end, and a thousand lives in one process."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from builders.guarded_pool import Engine, attack_settings, guarded_pool, wait_for
from kv_canary.commands import SetEnabled
from kv_canary.errors import ConflictError
from kv_canary.sidecar import Sidecar

TESTS = Path(__file__).parents[1]


def in_child(check: Callable[[], None]) -> int:
    """Forks, runs `check` in the child, and gives its exit status; -14 when it hung for 20 s."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            signal.alarm(20)
            check()
            status = 0
        except BaseException:  # noqa: BLE001 - the status says so
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_neither_records_nor_serves_nor_hangs_and_the_parent_goes_on() -> None:
    """The child of a data loader: hooks are silent in it, commands are refused, and all of it ends at once."""
    with guarded_pool(served=True) as (sidecar, engine):
        url = sidecar.settle().url
        assert url is not None
        with engine.between_steps():  # so that the engine's own lock is not what the child inherits
            parent = os.getpid()

            def check() -> None:
                assert not engine.gate.recording
                engine.gate.boundary(engine)
                assert not engine.gate.recording
                assert sidecar.suspend("a graph")
                sidecar.resume("a graph")
                with pytest.raises(ConflictError, match="forked child"):
                    sidecar.submit(SetEnabled(enabled=True)).result(0)
                assert (sidecar.snapshot().state, sidecar.snapshot().pid) == ("stopped", os.getpid())
                assert str(parent) in (sidecar.snapshot().reason or "")
                sidecar.release(engine.gate)
                sidecar.detach()
                assert threading.active_count() == 1

            statuses = [in_child(check) for _ in range(20)]
        assert statuses == [0] * 20
        verified = sidecar.settle().groups[0].counters.verified_pages
        wait_for(lambda: sidecar.snapshot().groups[0].counters.verified_pages > verified + 200)
        assert httpx.get(f"{url}/healthz", trust_env=False).status_code == 200
        assert httpx.get(f"{url}/v1/targets", trust_env=False).json()[0]["targets"], (
            "the child removed the parent's entry"
        )
        assert sidecar.snapshot().incidents == ()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("lock", ["gate", "suspension", "door"])
def test_a_lock_that_was_held_at_the_fork_does_not_hang_the_child(lock: str) -> None:
    with guarded_pool(traffic=False) as (sidecar, engine):
        held = {"gate": engine.gate._lock, "suspension": sidecar._canary.suspension._lock, "door": sidecar._door}[lock]

        def check() -> None:
            engine.gate.close()
            sidecar.suspend("a graph")
            sidecar.submit(SetEnabled(enabled=True)).exception(0)
            sidecar.detach()

        with held:
            status = in_child(check)
        assert status == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_that_outlives_its_parents_canary_holds_neither_port_nor_connections() -> None:
    """A restarted canary finds its port free, and a client sees the end of its connection."""
    reading, writing = os.pipe()
    with guarded_pool(served=True) as (sidecar, engine):
        port = int((sidecar.settle().url or "").rpartition(":")[2])
        client = socket.create_connection(("127.0.0.1", port), timeout=20)
        client.sendall(b"GET /v1/canary HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 200"
        with engine.between_steps():
            child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)  # until the parent lets go of the other end
            os._exit(0)
    try:
        while client.recv(65536):
            pass
        client.close()
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
            again.listen(1)
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


EXITS = {
    "the end of the program": ("", 0),
    "an exit status": ("sys.exit(7)", 7),
    "an exception": ("raise RuntimeError('the host has died of its own')", 1),
    "in the middle of a sweep": ("sidecar.submit(RequestSweep())", 0),
    "with a stream open": ("s = stream(url)", 0),
    "after a fork": ("os.fork() or sys.exit(0)\nos.wait()\n", 0),
    "a child that exits like a program": ("child = os.fork()\nif child:\n    assert os.wait()[1] == 0\n", 0),
}


@pytest.mark.parametrize("way", EXITS)
def test_the_interpreter_ends_as_if_there_were_no_canary(way: str, tmp_path: Path) -> None:
    """With everything running: no traceback, no hang, the exit status unchanged, and no entry left behind."""
    code, status = EXITS[way]
    program = textwrap.dedent(
        """
        import os, socket, sys, warnings
        sys.path.insert(0, sys.argv[1])
        from builders.guarded_pool import Engine, attack_settings, wait_for
        from kv_canary.commands import RequestSweep
        from kv_canary.sidecar import Sidecar
        warnings.simplefilter("ignore", DeprecationWarning)

        def stream(url):
            sock = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
            sock.sendall(b"GET /v1/incidents/stream HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
            assert sock.recv(12) == b"HTTP/1.1 200"
            return sock

        engine = Engine(pages=2048)
        sidecar = Sidecar(attack_settings(), engine="test", engine_version="0")
        sidecar.start()
        sidecar.serve()
        sidecar.attach(engine.gate, [(engine.ledger, [engine.group])])
        engine.boundary()
        url = sidecar.settle().url
        wait_for(lambda: sidecar.snapshot().groups[0].counters.verified_pages)
        """
    )
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "NUMBA_CACHE_DIR": ""}
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{code}", str(TESTS)],
        capture_output=True,
        text=True,
        timeout=120,
        env={key: value for key, value in environment.items() if value},
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    wanted = "RuntimeError: the host has died of its own" if status == 1 else ""
    assert (done.stderr.strip().splitlines() or [""])[-1] == wanted
    assert done.stderr.count("Traceback") == (status == 1)
    assert list(tmp_path.glob("**/*.json")) == []


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


CYCLES = int(os.environ.get("KV_CANARY_CYCLES", "60"))


def test_attaching_and_detaching_over_and_over_leaves_nothing_behind(record_property: pytest.RecordProperty) -> None:
    """A whole life each time, served and asked; `KV_CANARY_CYCLES=1000` is the long form."""

    def live() -> None:
        engine = Engine()
        sidecar = Sidecar(attack_settings(), engine="test", engine_version="0")
        sidecar.start()
        sidecar.serve()
        sidecar.attach(engine.gate, [(engine.ledger, [engine.group])])
        engine.boundary()
        assert httpx.get(f"{sidecar.settle().url}/v1/canary", trust_env=False).status_code == 200
        sidecar.detach()

    for _ in range(10):
        live()
    gc.collect()
    threads, files, memory = threading.active_count(), len(os.listdir("/proc/self/fd")), [resident_bytes()]
    for number in range(CYCLES):
        live()
        if number % 10 == 9:
            gc.collect()
            memory.append(resident_bytes())
    gc.collect()
    grown = (memory[-1] - memory[len(memory) // 2]) / (CYCLES / 2)
    print(f"\n{CYCLES} lives: {grown:.0f} bytes of resident memory more each, over the second half")
    record_property("bytes_a_cycle", grown)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files
    assert grown < 64 << 10  # one pool alone is eight times that


def test_a_sidecar_forgets_the_engines_that_it_let_go_of() -> None:
    """Attached and released over and over, it lists nothing of those before."""
    from kv_canary.snapshot import UncoveredBuffer

    with guarded_pool(traffic=False) as (sidecar, _):
        before = sidecar.settle()
        for number in range(20):
            engine = Engine(pages=8)
            lost = UncoveredBuffer(name=f"buffer {number}", reason="made up")
            sidecar.attach(engine.gate, [(engine.ledger, [engine.group])], uncovered=[lost])
            engine.boundary()
            assert sidecar.settle().uncovered == (lost,)
            sidecar.release(engine.gate)
        after = sidecar.settle()
    assert after.uncovered == before.uncovered == ()
    assert len(after.groups) == 1
