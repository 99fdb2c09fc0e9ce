"""The engine part of `kv-canary bench`: a continuous-batching engine with the canary off and on, taking turns.

Off means off: no hook is installed. Every run has a manager of its own over the same model, the same prompts in the
same order, and greedy decoding, so all runs do the same steps. Step times are taken around the engine's own step, on
its thread.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kv_canary.bench.engine_runs import Run, against, side
from kv_canary.bench.engines import EngineRequest
from kv_canary.errors import KVCanaryError
from kv_canary.settings import Budget, Settings
from kv_canary.snapshot import Snapshot
from kv_canary_transformers.attach import attach
from kv_canary_transformers.demo.engine import PAGE_TOKENS, VOCABULARY, build_manager, build_model
from kv_canary_transformers.versions import check_version

REQUESTS = 24
PROMPT_TOKENS = (16, 80)
PAGES = 18 * REQUESTS  # all requests at once, whole
WARM_REQUESTS = 4
WARM_TOKENS = 16
_LIMIT_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model, and how many tokens each request gets: enough steps for a p99, not too many seconds."""

    name: str
    new_tokens: int
    config: dict[str, Any]


# `tiny` is the hardest case: its steps are Python from end to end, so whatever the canary does with the GIL is felt.
# The steps of `small` are mostly kernels, as those of a server are.
SIZES = (
    Size(name="tiny", new_tokens=128, config={}),
    Size(
        name="small",
        new_tokens=48,
        config={
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
    ),
)


def measure(request: EngineRequest) -> dict[str, Any]:
    """Runs off, on, off, on ... for each size of model, and returns the document of the engine part."""
    version = check_version()
    if request.device == "cpu":
        # one core is left for the canary, as a server would leave it
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))
    return {
        "engine": "transformers",
        "engine_version": version,
        "device": request.device,
        "engine_threads": torch.get_num_threads(),
        "requests": REQUESTS,
        "repeats": request.repeats,
        "models": [_measure_size(size, request) for size in SIZES],
    }


def _measure_size(size: Size, request: EngineRequest) -> dict[str, Any]:
    model = build_model(device=request.device, **size.config)
    prompts = make_prompts()
    variants: list[Budget | None] = [None, *request.budgets]
    for variant in variants[:2]:
        _run(model, prompts, size.new_tokens, variant)  # compiles, fills caches; not counted
    runs: dict[int, list[Run]] = {index: [] for index in range(len(variants))}
    for _ in range(request.repeats):
        for index, variant in enumerate(variants):
            runs[index].append(_run(model, prompts, size.new_tokens, variant))
            request.each_part(1 / len(SIZES))
    return {
        "model": size.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "new_tokens": size.new_tokens,
        "off": side(runs[0]),
        "on": [
            {"budget": str(budget), **side(runs[index]), **against(runs[index], runs[0])}
            for index, budget in enumerate(request.budgets, start=1)
        ],
    }


def make_prompts(seed: int = 0) -> list[list[int]]:
    """Half of them share a prefix of some pages with another one."""
    choose = random.Random(seed)
    prefixes = [[choose.randrange(3, VOCABULARY) for _ in range(2 * PAGE_TOKENS)] for _ in range(REQUESTS // 4)]
    prompts = []
    for index in range(REQUESTS):
        tail = [choose.randrange(3, VOCABULARY) for _ in range(choose.randint(*PROMPT_TOKENS))]
        prompts.append(prefixes[index // 4] + tail if index % 2 else tail)
    return prompts


def _run(model: Any, prompts: Sequence[list[int]], new_tokens: int, budget: Budget | None) -> Run:
    manager = build_manager(model, pages=PAGES)
    sidecar = (
        attach(manager, Settings(enabled=True, budget=budget), serve=False, seed=0) if budget is not None else None
    )
    steps: list[float] = []
    manager._generation_loop_body = _timed(manager, steps)
    try:
        manager.start()
        _generate(manager, prompts[:WARM_REQUESTS], "warm", WARM_TOKENS)
        before = None if sidecar is None else sidecar.settle()
        steps.clear()
        started = time.perf_counter()
        tokens = _generate(manager, prompts, "bench", new_tokens)
        seconds = time.perf_counter() - started
        taken = tuple(steps)
        after = None if sidecar is None else sidecar.settle()
    finally:
        if manager.is_running():
            manager.stop(block=True, timeout=30, hard_stop=True, keep_for_next_session=False)
        if sidecar is not None:
            sidecar.detach()
        vars(manager).pop("_generation_loop_body", None)
    return Run(
        tokens_per_second=tokens / seconds,
        step_seconds=taken,
        hook_seconds_per_step=(_hook_seconds(after) - _hook_seconds(before)) / max(1, len(taken)),
        read_bytes_per_second=(_read_bytes(after) - _read_bytes(before)) / seconds,
        mismatches=_mismatches(after),
    )


def _timed(manager: Any, steps: list[float]) -> Callable[..., bool]:
    """The engine's loop body, with the seconds of every pass that made a step put into `steps`."""
    original = manager._generation_loop_body

    def timed(*args: Any, **kwargs: Any) -> bool:
        batch, started = manager.current_batch, time.perf_counter()
        goes_on: bool = original(*args, **kwargs)
        if manager.current_batch != batch:
            steps.append(time.perf_counter() - started)
        return goes_on

    return timed


def _generate(manager: Any, prompts: Sequence[list[int]], label: str, new_tokens: int) -> int:
    """Asks for all at once, waits for the answers, and returns the number of generated tokens."""
    for index, prompt in enumerate(prompts):
        manager.add_request(prompt, request_id=f"{label}-{index}", max_new_tokens=new_tokens)
    tokens, missing, until = 0, len(prompts), time.monotonic() + _LIMIT_SECONDS
    while missing:
        result = manager.get_result(timeout=1.0)
        if result is not None and result.is_finished():
            tokens += len(result.generated_tokens)
            missing -= 1
        elif not manager.is_running() or time.monotonic() > until:
            raise KVCanaryError(f"the engine did not finish: {manager.background_thread_status.fatal_error}")
    return tokens


def _hook_seconds(snapshot: Snapshot | None) -> float:
    return 0.0 if snapshot is None else sum(snapshot.hook_seconds.values())


def _read_bytes(snapshot: Snapshot | None) -> int:
    return 0 if snapshot is None else sum(sum(group.counters.read_bytes.values()) for group in snapshot.groups)


def _mismatches(snapshot: Snapshot | None) -> int:
    return 0 if snapshot is None else sum(sum(group.counters.mismatches.values()) for group in snapshot.groups)
