"""A real transformers continuous-batching engine for tests: built locally, float32, guarded or not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kv_canary import Budget, Settings
from kv_canary.sidecar import Sidecar
from kv_canary.snapshot import Snapshot
from kv_canary_transformers import attach
from kv_canary_transformers.demo.engine import build_manager, build_model


def make_settings(**overrides: Any) -> Settings:
    return Settings(**{"budget": Budget(share=0.5), "allow_content_drills": True, "port": 0, **overrides})


@contextmanager
def guarded_engine(
    *,
    pages: int = 96,
    settings: Settings | None = None,
    guarded: bool = True,
    model: Any = None,
    started: bool = True,
    may_die: bool = False,
    **options: Any,
) -> Iterator[tuple[Any, Sidecar | None]]:
    """(manager, sidecar); both are stopped at the end, and the engine must not have died on its own."""
    torch.set_num_threads(1)
    model = model if model is not None else build_model()
    manager = build_manager(model, pages=pages, **options)
    sidecar = attach(manager, settings or make_settings(), serve=False, seed=0) if guarded else None
    try:
        if started:
            manager.start()
        yield manager, sidecar
        assert may_die or manager.background_thread_status.fatal_error is None
    finally:
        if manager.is_running():
            manager.stop(block=True, timeout=30, hard_stop=True, keep_for_next_session=False)
        if sidecar is not None:
            sidecar.detach()


def generate(
    manager: Any, prompts: list[list[int]], *, new_tokens: int = 24, seconds: float = 120
) -> dict[str, list[int]]:
    """Asks for all prompts at once and waits for the answers: request id -> generated tokens."""
    for index, prompt in enumerate(prompts):
        manager.add_request(prompt, request_id=f"r{index}", max_new_tokens=new_tokens)
    children = max(0, manager.num_return_sequences - 1)
    return collect(manager, len(prompts) * (1 + children), seconds)


def collect(manager: Any, count: int, seconds: float = 120) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {}
    deadline = time.monotonic() + seconds
    while len(answers) < count:
        assert time.monotonic() < deadline, f"{len(answers)} of {count} answers in time"
        result = manager.get_result(timeout=0.5)
        if result is not None and result.is_finished():
            assert result.error is None, result.error
            answers[result.request_id] = list(result.generated_tokens)
    return answers


def prompts_sharing_prefixes(count: int, *, prefix: int = 48, tail: int = 20) -> list[list[int]]:
    """Prompts over three shared prefixes; the same ones every time."""
    return [
        [3 + (i % 3 * 50 + j) % 400 for j in range(prefix)] + [3 + (i * 17 + j * 5) % 400 for j in range(tail)]
        for i in range(count)
    ]


def wait_until(condition: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time limit"
        time.sleep(0.005)


def real_incidents(snapshot: Snapshot) -> list[Any]:
    return [incident for incident in snapshot.incidents if incident.source == "real"]


@contextmanager
def paused(manager: Any) -> Iterator[None]:
    """No step runs inside. The generation thread waits at the next step boundary."""
    processor = manager.batch_processor
    import threading

    reached, go_on = threading.Event(), threading.Event()
    original = processor.prepare_next_batch

    def wait_here() -> Any:
        reached.set()
        go_on.wait(60)
        return original()

    processor.prepare_next_batch = wait_here
    assert reached.wait(10)
    try:
        yield
    finally:
        processor.prepare_next_batch = original
        go_on.set()
