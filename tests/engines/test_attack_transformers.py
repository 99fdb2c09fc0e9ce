"""The real engine while its canary is attacked: the same tokens, no false alarm, and how long its steps take.

Step times are reported, not asserted: machines are shared. Each figure is a median over interleaved rounds of the ratio
to the same attack on another server of the same machine, so that what the clients themselves take up is in both.
`KV_CANARY_ATTACK_ROUNDS=15` and `KV_CANARY_FUZZ_CASES=20000` make it the long form.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders.decoy import decoy
from builders.fuzzing import fuzz
from builders.hostile import KINDS, under_attack
from builders.transformers_engine import (
    generate,
    guarded_engine,
    make_settings,
    prompts_sharing_prefixes,
    real_incidents,
    wait_until,
)
from kv_canary.commands import PatchSettings, SetEnabled
from kv_canary.settings import Budget

pytestmark = pytest.mark.engines

ROUNDS = int(os.environ.get("KV_CANARY_ATTACK_ROUNDS", "1"))
CASES = int(os.environ.get("KV_CANARY_FUZZ_CASES", "500"))
PROMPTS = prompts_sharing_prefixes(12)
NEW_TOKENS = 100


class Bench:
    """One engine, served; what it answers and how long its steps take."""

    def __init__(self, manager: Any, sidecar: Any) -> None:
        self.manager, self.sidecar = manager, sidecar
        self._steps: list[float] = []
        processor = manager.batch_processor
        prepare = processor.prepare_next_batch

        def noted() -> Any:
            self._steps.append(time.perf_counter())
            return prepare()

        processor.prepare_next_batch = noted

    @property
    def port(self) -> int:
        return int(self.sidecar.snapshot().url.rpartition(":")[2])

    def run(self) -> tuple[dict[str, list[int]], np.ndarray]:
        """The answers, and the seconds of each step."""
        self._steps.clear()
        answers = generate(self.manager, PROMPTS, new_tokens=NEW_TOKENS)
        return answers, np.diff(np.array(self._steps))


@contextmanager
def bench(**options: Any) -> Iterator[Bench]:
    settings = make_settings(budget=Budget(share=0.01), **options)
    with guarded_engine(pages=192, settings=settings) as (manager, sidecar):
        assert sidecar is not None
        wait_until(lambda: manager.batch_processor is not None)
        sidecar.serve()
        one = Bench(manager, sidecar)
        one.run()  # the first steps are slower, and the prefix cache fills
        yield one


def ratios(here: list[np.ndarray], there: list[np.ndarray]) -> str:
    """Medians over the rounds."""

    def ratio(part: float) -> float:
        return statistics.median(
            float(np.quantile(a, part) / np.quantile(b, part)) for a, b in zip(here, there, strict=True)
        )

    middle = statistics.median(float(np.median(steps)) for steps in there)
    return f"p50 {ratio(0.5):.3f}  p99 {ratio(0.99):.3f}  (step {middle * 1e3:.1f} ms, {len(here)} rounds)"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_clients_change_no_token(kind: str) -> None:
    with bench() as one, decoy() as elsewhere:
        right, _ = one.run()
        here: list[np.ndarray] = []
        there: list[np.ndarray] = []
        for number in range(ROUNDS):
            arms = [(here, one.port), (there, elsewhere)]
            for steps, port in arms if number % 2 else reversed(arms):
                with under_attack(kind, port):
                    answers, seconds = one.run()
                steps.append(seconds)
                assert answers == right
        snapshot = one.sidecar.settle()
    print(f"\n{kind:12} step ratio, attacked here / elsewhere: {ratios(here, there)}")
    assert (snapshot.incidents, snapshot.errors) == ((), {})


@pytest.mark.timeout(7200)
def test_the_api_is_fuzzed_while_the_engine_serves(tmp_path: Path) -> None:
    """Switches, settings, sweeps and drills in any order, valid or not: no server error, and every token the same."""
    with bench() as one, decoy() as elsewhere:
        right, _ = one.run()
        here: list[np.ndarray] = []
        there: list[np.ndarray] = []
        cases, number = 0, 0
        with ExitStack() as fuzzers:
            fuzzed = {
                port: fuzzers.enter_context(fuzzing(f"http://127.0.0.1:{port}", tmp_path / str(port)))
                for port in (one.port, elsewhere)
            }
            while cases < CASES or number < 2:
                # a stretch of fuzzing here, then the same elsewhere, as long as there is something to compare
                port, steps = ((one.port, here), (elsewhere, there))[number % 2 if number < 2 * ROUNDS else 0]
                as_delivered(one.sidecar)
                done = threading.Event()
                fuzzed[port](number, done)
                while not done.is_set():
                    answers, seconds = one.run()
                    assert answers == right
                    steps.append(seconds)
                cases = sum(result.cases for result in fuzzed[one.port].results)
                number += 1
        for result in fuzzed[one.port].results:
            assert not result.failures, result.failures
        snapshot = one.sidecar.settle()
    count = min(len(here), len(there))
    print(f"\n{cases} requests made up for the serving engine; {len(here)} runs of it during them")
    print(f"fuzz         step ratio, fuzzed here / elsewhere: {ratios(here[:count], there[:count])}")
    assert real_incidents(snapshot) == []
    assert snapshot.errors == {}


def as_delivered(sidecar: Any) -> None:
    """Undoes what the fuzzer has set."""
    live = {"budget": "1%", "sweep_deadline": 60.0, "drill_interval": 600.0, "on_mismatch": "log"}
    sidecar.submit(PatchSettings(changes=live)).result(10)
    sidecar.submit(SetEnabled(enabled=True)).result(10)


class Fuzzing:
    """Stretches of fuzzing, each on a thread that waits for a process."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self.results: list[Any] = []
        self._threads: list[threading.Thread] = []
        folder.mkdir(parents=True)

    def __call__(self, seed: int, done: threading.Event) -> None:
        def stretch() -> None:
            try:
                self.results.append(fuzz(self._url, self._folder, seed=seed, examples=25, phases="fuzzing"))
            finally:
                done.set()

        self._threads.append(threading.Thread(target=stretch))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


@contextmanager
def fuzzing(url: str, folder: Path) -> Iterator[Fuzzing]:
    one = Fuzzing(url, folder)
    try:
        yield one
    finally:
        one.join()
