"""A real SGLang server in processes of its own, asked over HTTP, and from inside through a plugin of the tests."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

INSIDE = Path(__file__).parents[1] / "engines" / "sglang" / "inside"

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "load-format": "dummy",
    "dtype": "bfloat16",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-cuda-graph": True,
    "skip-tokenizer-init": True,
    "skip-server-warmup": True,
    "max-total-tokens": 1024,
    "max-running-requests": 8,
    "chunked-prefill-size": 64,
    "page-size": 1,
    "random-seed": 0,
    "log-level": "info",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def traffic(count: int, seed: int) -> list[list[int]]:
    """Prompts; more than half of them begin with one of three long prefixes."""
    source = random.Random(seed)
    shared = [[source.randrange(3, 256) for _ in range(length)] for length in (50, 90, 130)]
    prompts = []
    for _ in range(count):
        head = source.choice(shared) if source.random() < 0.6 else []
        prompts.append(head + [source.randrange(3, 256) for _ in range(source.randrange(1, 90))])
    return prompts


@dataclass
class Server:
    """One server; `inside` asks the scheduler's process."""

    url: str
    socket: str
    log: Path

    def generate(self, prompt: list[int], *, tokens: int = 24, seconds: float = 120) -> list[int]:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(
            f"{self.url}/generate", json={"input_ids": prompt, "sampling_params": sampling}, timeout=seconds
        )
        answer.raise_for_status()
        ids: list[int] = answer.json()["output_ids"]
        return ids

    def converse(self, turns: list[list[int]], *, tokens: int = 12) -> None:
        """One session; each turn goes on from the one before."""
        session = httpx.post(f"{self.url}/open_session", json={"capacity_of_str_len": 4096}, timeout=60).json()
        last: str | None = None
        for turn in turns:
            sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
            body = {
                "input_ids": turn,
                "sampling_params": sampling,
                "session_params": {"id": session, "rid": last},
            }
            answer = httpx.post(f"{self.url}/generate", json=body, timeout=120)
            answer.raise_for_status()
            last = answer.json()["meta_info"]["id"]
        httpx.post(f"{self.url}/close_session", json={"session_id": session}, timeout=60).raise_for_status()

    def abandon(self, prompt: list[int]) -> None:
        """Reads a little of a stream, then hangs up: the server aborts the request."""
        body = {
            "input_ids": prompt,
            "stream": True,
            "sampling_params": {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True},
        }
        with httpx.stream("POST", f"{self.url}/generate", json=body, timeout=60) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number > 3:
                    return

    def all(self, prompts: list[list[int]], *, tokens: int = 24) -> list[list[int]]:
        """All of them at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, tokens=tokens), prompts))

    def flush(self) -> None:
        until = time.monotonic() + 30
        while httpx.post(f"{self.url}/flush_cache", timeout=60).status_code != 200 and time.monotonic() < until:
            time.sleep(0.1)

    def inside(self, name: str, *arguments: Any, rank: int = 0) -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(200)
            connection.connect(f"{self.socket}.{rank}")
            with connection.makefile("rw") as stream:
                stream.write(json.dumps([name, arguments]) + "\n")
                stream.flush()
                outcome, value = json.loads(stream.readline())
        assert outcome == "done", value
        return value


def environment_of(folder: Path, canary: dict[str, str] | None) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KV_CANARY")}
    environment |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(INSIDE), str(INSIDE.parents[2])]),
        "TEST_INSIDE": str(folder / "inside"),
    }
    if canary is not None:
        environment |= {"KV_CANARY": "on", "KV_CANARY_PORT": "0", "KV_CANARY_BUDGET": "50%", **canary}
    return environment


@contextmanager
def running_engine(model: Path, folder: Path, program: Path) -> Iterator[tuple[Server, list[list[int]]]]:
    """A program that has an engine of its own, and what it answered; it ends when it is told to."""
    with (folder / "engine.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, program, model],
            env=environment_of(folder, {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            text=True,
        )
    try:
        assert process.stdout is not None
        told = next((line for line in process.stdout if line.startswith("{")), None)
        assert told is not None, (folder / "engine.log").read_text()[-6000:]
        yield Server(url="", socket=str(folder / "inside"), log=folder / "engine.log"), json.loads(told)["tokens"]
        process.communicate("\n", timeout=60)
    finally:
        _stop(process)


@contextmanager
def serving(model: Path, folder: Path, *, canary: dict[str, str] | None = None, **options: Any) -> Iterator[Server]:
    """`canary`: `KV_CANARY_*` settings; None: the canary is not switched on. `options`: of the server."""
    port, log = free_port(), folder / "server.log"
    environment = environment_of(folder, canary)
    arguments = [f"--model-path={model}", f"--port={port}", "--host=127.0.0.1"]
    for name, value in (OPTIONS | {name.replace("_", "-"): value for name, value in options.items()}).items():
        if value is not False:
            arguments.append(f"--{name}" if value is True else f"--{name}={value}")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *arguments],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(url=f"http://127.0.0.1:{port}", socket=str(folder / "inside"), log=log)
    try:
        _wait(server, process)
        yield server
    finally:
        _stop(process)


def _wait(server: Server, process: subprocess.Popen[Any], seconds: float = 180) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert process.poll() is None, server.log.read_text()[-6000:]
        try:
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    raise AssertionError(f"not healthy after {seconds} s:\n{server.log.read_text()[-6000:]}")


def _stop(process: subprocess.Popen[Any]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(20)
            break
        except subprocess.TimeoutExpired:
            continue
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its children
