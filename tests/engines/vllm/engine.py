"""A vLLM engine in this process, and what the scenarios do to it. One engine a process: vLLM 0.32 on a CPU cannot start
a second one after numba has been imported.
"""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 32

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "enforce_eager": True,
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 16 << 20,
    "block_size": BLOCK_TOKENS,
    "disable_log_stats": True,
    "seed": 0,
}


def start_engine(model: Path, *, processes: bool = False, **options: Any) -> Any:
    """An `LLM`; with `processes`, its engine core is a process of its own."""
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="1" if processes else "0")
    from vllm import LLM

    return LLM(model=str(model), **(OPTIONS | options))


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def worker_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker


def guard_of(llm: Any) -> Any:
    """The worker's guard; None when the canary is off."""
    return vars(worker_of(llm)).get("_kv_canary")


def prompts_of_traffic(count: int, seed: int) -> list[list[int]]:
    """Half of them begin with one of three long prefixes; lengths from a few tokens to several chunks."""
    source = random.Random(seed)
    shared = [[source.randrange(3, 256) for _ in range(length)] for length in (70, 130, 200)]
    prompts = []
    for _ in range(count):
        head = source.choice(shared) if source.random() < 0.6 else []
        prompts.append(head + [source.randrange(3, 256) for _ in range(source.randrange(1, 120))])
    return prompts


def generate(llm: Any, prompts: list[list[int]], *, new_tokens: int = 40) -> list[list[int]]:
    """Greedy tokens of each prompt, all of them asked for at once."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def verify_at_least(guard: Any, pages: int, *, seconds: float = 120) -> Any:
    """Waits until so many pages have been verified in all groups; the snapshot then."""
    until = time.monotonic() + seconds
    while True:
        snapshot = guard.sidecar.settle()
        if sum(group.counters.verified_pages for group in snapshot.groups) >= pages or time.monotonic() > until:
            return snapshot
        time.sleep(0.05)


def wait_for_incident(guard: Any, known: int, *, seconds: float = 30) -> list[Any]:
    """Incidents behind the first `known`, as soon as there is one."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        incidents = [one for one in guard.sidecar.settle().incidents if one.source == "real"]
        if len(incidents) > known:
            return incidents[known:]
        time.sleep(0.02)
    return []


def real_incidents(guard: Any) -> list[Any]:
    return [one for one in guard.sidecar.settle().incidents if one.source == "real"]


@contextmanager
def nobody_reading(guard: Any) -> Iterator[None]:
    """For a fault, or its mending, that must not fall between the two reads of one verification."""
    assert guard.sidecar.suspend("a test changes bytes", 30)
    try:
        yield
    finally:
        guard.sidecar.resume("a test changes bytes")


def flip(buffer: Any, page: int, byte: int, bit: int = 0) -> None:
    """Flips one bit of one byte of a page, `byte` counted in the order of memory inside the page's first run."""
    address = buffer.address + page * buffer.page_stride + byte
    cell = (ctypes.c_uint8 * 1).from_address(address)
    cell[0] ^= 1 << bit


def buffers_of(guard: Any, group: str) -> list[Any]:
    found = next(one.group for one in guard.sidecar._canary._guards if one.group.name == group)
    return list(found.buffers)


def sealed_pages(guard: Any) -> list[int]:
    """Pages that are sealed and have a fingerprint, in order."""
    guard.sidecar.settle()
    pages: set[int] = set()
    for one in guard.sidecar._canary._guards:
        states = guard.ledger.states(0, guard.ledger.pages)
        pages |= {int(page) for page in one.verifier.select(0, one.group.pages) if states[page] == 2}
    return sorted(pages)


def told(incident: Any) -> dict[str, Any]:
    """What a test wants to know of an incident, JSON-ready."""
    return {
        "check": incident.check,
        "group": incident.group,
        "page": incident.page,
        "layers": list(incident.layers),
        "persistence": incident.persistence,
        "owner": incident.owner,
        "previous_owner": incident.previous_owner,
        "state": incident.page_state,
        "summary": incident.summary,
        "reaction": incident.reaction,
    }
