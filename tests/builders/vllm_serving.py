"""A real `vllm serve` in processes of its own, asked over its OpenAI API and through the canary's own API."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

EXTENSION = Path(__file__).parents[1] / "engines" / "vllm"
RANKS = 2

ARGUMENTS = [
    "--load-format=dummy",
    "--enforce-eager",
    "--dtype=bfloat16",
    "--max-model-len=512",
    "--max-num-seqs=8",
    "--max-num-batched-tokens=64",
    f"--kv-cache-memory-bytes={4 << 20}",
    "--block-size=32",
    f"--tensor-parallel-size={RANKS}",
    "--worker-extension-cls=worker_extension.FaultInjection",
    "--served-model-name=tiny",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Serving:
    """The server's address and those of its canaries, by rank."""

    url: str
    canaries: list[str]
    log: Path

    def complete(self, prompt: list[int], *, tokens: int = 24, seconds: float = 120) -> list[int]:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=seconds)
        answer.raise_for_status()
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    def abandon(self, prompt: list[int]) -> None:
        """Reads a few tokens of a stream, then hangs up."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 100, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number > 3:
                    return

    def in_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of the test's worker extension; what each rank returned."""
        body = {"method": method, "args": list(arguments), "timeout": 60}
        answer = httpx.post(f"{self.url}/collective_rpc", json=body, timeout=90)
        answer.raise_for_status()
        results: list[Any] = answer.json()["results"]
        return results

    def status(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.canaries[rank]}/v1/status", timeout=60).json()
        return found

    def counters(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = self.status(rank)["groups"][0]["counters"]
        return found

    def incidents(self, rank: int) -> list[dict[str, Any]]:
        found = httpx.get(f"{self.canaries[rank]}/v1/incidents?limit=1000", timeout=60).json()["incidents"]
        return [one for one in found if one["source"] == "real"]

    def wait_for_incidents(self, rank: int, known: int, seconds: float = 90) -> list[dict[str, Any]]:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if len(found := self.incidents(rank)) > known:
                return found[known:]
            time.sleep(0.05)
        return []


@contextmanager
def serving(model: Path, folder: Path, **canary: str) -> Iterator[Serving]:
    port, log = free_port(), folder / "server.log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KV_CANARY")}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "INFO",  # the workers say there where their canaries are
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONPATH": str(EXTENSION),
        "KV_CANARY": "on",
        "KV_CANARY_PORT": str(free_port()),
        **canary,
    }
    program = Path(sys.executable).with_name("vllm")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, "serve", model, f"--port={port}", "--host=127.0.0.1", *ARGUMENTS],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, process, log)
        yield Serving(url, _canaries(log), log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 240
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"the server did not come up: {log.read_text()[-4000:]}")


def _canaries(log: Path) -> list[str]:
    """The addresses that the workers say in the server's log, in the order of their ports: that of the ranks."""
    said = {line.split("canary API on ")[1].strip() for line in log.read_text().splitlines() if "canary API on" in line}
    return sorted(said)


class Load:
    """Clients that ask all the time until it ends: shared prefixes, fresh prompts, and some that hang up."""

    def __init__(self, server: Serving, clients: int = 4) -> None:
        self._server = server
        self._stop = threading.Event()
        self.answers = 0
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def wait_for(self, answers: int, seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while self.answers < answers and not self.failures and time.monotonic() < until:
            time.sleep(0.05)

    def _run(self, number: int) -> None:
        source = random.Random(number)
        heads = [
            [random.Random(seed).randrange(3, 256) for _ in range(length)] for seed, length in enumerate((70, 130))
        ]
        while not self._stop.is_set():
            head = source.choice([[], *heads])
            prompt = head + [source.randrange(3, 256) for _ in range(source.randrange(1, 100))]
            try:
                if source.random() < 0.15:
                    self._server.abandon(prompt)
                else:
                    self._server.complete(prompt)
                self.answers += 1
            except (httpx.HTTPError, json.JSONDecodeError, KeyError) as error:
                self.failures.append(repr(error))
                return
