"""The image by itself: what it may do, what it may not, and how it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest

from builders.containers import Engine
from builders.live import START_SECONDS, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1800)]

HARDENED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")


@dataclass(frozen=True, kw_only=True)
class Container:
    """One that runs, with the API on a published port."""

    engine: Engine
    id: str
    url: str

    def run(self, *command: str) -> tuple[int, str]:
        done = self.engine.docker("exec", self.id, *command, check=False)
        return done.returncode, (done.stdout + done.stderr).strip()

    @property
    def log(self) -> str:
        return self.engine.logs(self.id)


@contextmanager
def started(engine: Engine, *options: str) -> Iterator[Container]:
    """Verifies pages before it is given out."""
    name = engine.docker("run", "--detach", "--publish=127.0.0.1::10470", *options, engine.image).stdout.strip()
    try:
        port = engine.docker("port", name, "10470/tcp").stdout.split()[0].rpartition(":")[2]
        container = Container(engine=engine, id=name, url=f"http://127.0.0.1:{port}")
        wait_until(lambda: "metrics  http" in container.log, START_SECONDS, f"{name} verifies pages")
        yield container
    finally:
        engine.docker("rm", "--force", name)


@pytest.fixture(scope="module")
def hardened(engine: Engine) -> Iterator[Container]:
    with started(engine, *HARDENED, "--tmpfs=/tmp") as container:
        yield container


def test_it_runs_without_root_and_writes_nowhere_but_in_tmp(hardened: Container) -> None:
    assert hardened.run("id", "-u") == (0, "10470")
    status, answer = hardened.run("touch", "/usr/local/marker")
    assert (status, "Read-only file system" in answer) == (1, True)
    assert "compiled anew" not in hardened.log
    assert "Traceback" not in hardened.log


def test_reads_are_open_and_writes_closed_until_a_token_is_mounted(hardened: Container) -> None:
    assert httpx.get(f"{hardened.url}/metrics", trust_env=False).status_code == 200
    answer = httpx.put(f"{hardened.url}/v1/canary", json={"enabled": False}, trust_env=False)
    assert answer.status_code == 403
    assert "KV_CANARY_TOKEN_FILE" in answer.json()["detail"]
    assert httpx.get(f"{hardened.url}/v1/canary", trust_env=False).json()["enabled"]


def test_the_command_line_inside_finds_its_canary(hardened: Container) -> None:
    status, answer = hardened.run("kv-canary", "status", "--json")
    assert (status, json.loads(answer)["pid"]) == (0, 1)


def test_the_health_check_tells_alive_from_dead(hardened: Container) -> None:
    """Asked by hand: not every engine has timers for it."""
    config = json.loads(hardened.engine.docker("inspect", hardened.id).stdout)[0]["Config"]
    kind, *check = config["Healthcheck"]["Test"]
    assert kind == "CMD"
    assert hardened.run(*check)[0] == 0
    assert hardened.engine.docker("exec", "-e", "KV_CANARY_PORT=1", hardened.id, *check, check=False).returncode == 1
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_stopping_takes_less_than_five_seconds_and_is_clean(hardened: Container) -> None:
    """As PID 1, which has no default for SIGTERM. The last of this container's tests."""
    began = time.monotonic()
    hardened.engine.docker("stop", "--time", "10", hardened.id)
    seconds = time.monotonic() - began
    print(f"stopped after {seconds:.1f} s")
    state = json.loads(hardened.engine.docker("inspect", hardened.id).stdout)[0]["State"]
    assert state["ExitCode"] == 0, hardened.log
    assert seconds < 5
    assert hardened.log.rstrip().endswith(" 0 mismatches")
    assert "Traceback" not in hardened.log


def test_where_nothing_can_be_written_it_says_so_and_works(engine: Engine) -> None:
    """No tmpfs for the compiled kernels, and a uid of the platform's choice."""
    nowhere = [f"--env={name}=/nowhere" for name in ("HOME", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR")]
    with started(engine, *HARDENED, "--user=123456", *nowhere) as container:
        assert container.run("id", "-u") == (0, "123456")
        assert "kernels are compiled anew in this process" in container.log
        assert "set NUMBA_CACHE_DIR" in container.log


def test_over_an_engines_image_nothing_that_it_brought_is_changed(engine: Engine) -> None:
    """Here the demo's image stands for the engine's: it has torch and transformers, a user, and an entry point."""

    def packages(image: str) -> str:
        return engine.docker("run", "--rm", image, "python3", "-m", "pip", "list", "--format=freeze").stdout

    image = "localhost/kv-canary-over-engine:stack-test"
    engine.build(image, BASE=engine.image, EXTRAS="", TORCH="torch")
    try:
        assert packages(image) == packages(engine.image)
        assert "torch==" in packages(image)
    finally:
        engine.docker("rmi", image)
