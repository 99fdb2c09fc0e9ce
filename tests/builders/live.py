"""Real processes for the stack tests: a demo, the command line and a Prometheus, and waiting for what they do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

KV_CANARY = str(Path(sysconfig.get_path("scripts")) / "kv-canary")
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
START_SECONDS = 90.0  # importing torch and compiling the kernels, on a busy machine
POLL_SECONDS = 0.05
T = TypeVar("T")


def wait_until(read: Callable[[], T], seconds: float, what: str) -> T:
    """The first true thing that `read` gives; fails with `what` and the last thing when that takes too long."""
    deadline = time.monotonic() + seconds
    while not (last := read()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}; the last answer was {last!r}"
        time.sleep(POLL_SECONDS)
    return last


def stays(read: Callable[[], T], seconds: float) -> T:
    """Asks over and over for that long; fails as soon as the answer is another one than at first."""
    first, deadline = read(), time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert read() == first
        time.sleep(POLL_SECONDS)
    return first


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass(frozen=True, kw_only=True)
class Server:
    """A process whose KV cache is guarded."""

    process: subprocess.Popen[bytes]
    folder: Path
    ready: dict[str, Any]

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "summary.json").read_text()))

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        response = httpx.request(method, self.url + path, json=body, headers=headers, timeout=10, trust_env=False)
        return response.raise_for_status()

    def document(self, path: str) -> dict[str, Any]:
        return dict(self.ask("GET", path).json())

    def total(self, name: str, **labels: str) -> float:
        """The sum of all series of `/metrics` with that name and those labels; there must be one."""
        families = text_string_to_metric_families(self.ask("GET", "/metrics").text)
        values = [
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert values, f"no series {name}{labels}"
        return sum(values)

    def command(self, *arguments: str) -> tuple[int, dict[str, Any], float]:
        return command(self.url, *arguments)


def command(url: str, *arguments: str) -> tuple[int, dict[str, Any], float]:
    """`kv-canary ... --json`: exit status, document, seconds."""
    began = time.monotonic()
    done = subprocess.run(
        [KV_CANARY, "--url", url, *arguments, "--json"],
        capture_output=True,
        timeout=60,
        env=plain_environment(),
        check=False,
    )
    assert done.stdout, done.stderr.decode()
    return done.returncode, json.loads(done.stdout), time.monotonic() - began


def plain_environment() -> dict[str, str]:
    """Ours without the settings that a person may have set for their own canary."""
    return {key: value for key, value in os.environ.items() if not key.startswith("KV_CANARY")}


@contextmanager
def running(folder: Path, command: Sequence[str]) -> Iterator[Server]:
    """`command`, from its ready file (`folder/ready.json`) on; what it says goes to `folder/log`."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=plain_environment())
    with ended(process):
        ready = folder / "ready.json"
        wait_until(
            lambda: ready.exists() or process.poll() is not None, START_SECONDS, f"{command} gets ready, see {folder}"
        )
        assert ready.exists(), f"{command} ended with {process.returncode}:\n{(folder / 'log').read_text()}"
        yield Server(process=process, folder=folder, ready=json.loads(ready.read_text()))


@contextmanager
def running_demo(folder: Path, *, port: int = 0) -> Iterator[Server]:
    files = ["--ready-file", str(folder / "ready.json"), "--summary", str(folder / "summary.json")]
    with running(folder, [KV_CANARY, "demo", "--port", str(port), "--pages", "96", *files]) as server:
        yield server


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whatever happens inside, the process is gone afterwards."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True, kw_only=True)
class Prometheus:
    """A real Prometheus on loopback."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query: `metric` (its labels) and `value` (a time and a number as text)."""
        return list(self._ask("/api/v1/query", query=expression)["result"])

    def targets(self) -> dict[str, dict[str, Any]]:
        """Active targets by job."""
        return {target["labels"]["job"]: target for target in self._ask("/api/v1/targets")["activeTargets"]}

    def rules(self) -> list[dict[str, Any]]:
        """Groups of rules, with what came of them."""
        return list(self._ask("/api/v1/rules")["groups"])

    def exemplars(self, selector: str) -> list[dict[str, Any]]:
        now = time.time()
        found = self._ask("/api/v1/query_exemplars", query=selector, start=f"{now - 600:.3f}", end=f"{now + 60:.3f}")
        return [exemplar for series in found for exemplar in series["exemplars"]]

    def _ask(self, path: str, **parameters: str) -> Any:
        response = httpx.get(self.url + path, params=parameters, timeout=10, trust_env=False)
        return response.raise_for_status().json()["data"]


@contextmanager
def running_prometheus(folder: Path, config: str) -> Iterator[Prometheus]:
    (folder / "prometheus.yml").write_text(config)
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--enable-feature=exemplar-storage",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    with ended(process):
        url = f"http://{address}"
        wait_until(lambda: _is_ready(url) or process.poll() is not None, 30, f"{url} is ready, see {folder}")
        assert process.poll() is None, (folder / "log").read_text()
        yield Prometheus(url=url)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
