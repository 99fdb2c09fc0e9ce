"""Scenarios on a vLLM engine in one process: `python scenarios.py NAME MODEL` prints what happened as a line of JSON.

Each runs in a process of its own, so the tests start them as such and look at what they tell.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import engine
from engine import (
    buffers_of,
    flip,
    generate,
    guard_of,
    nobody_reading,
    prompts_of_traffic,
    real_incidents,
    scheduler_of,
    sealed_pages,
    told,
    verify_at_least,
    wait_for_incident,
)

Outcome = dict[str, Any]


def _traffic(model: Path, *, rounds: int, pages: int, **options: Any) -> Outcome:
    """Rounds of traffic; the tokens, and what the canary (if it is on) has seen."""
    llm = engine.start_engine(model, **options)
    scheduler = scheduler_of(llm)
    preempted = _count_calls(scheduler, "_preempt_request")
    tokens = [generate(llm, prompts_of_traffic(16, seed)) for seed in range(rounds)]
    outcome: Outcome = {"tokens": tokens, "preempted": len(preempted)}
    guard = guard_of(llm)
    if guard is None:
        loaded = sorted(name for name in sys.modules if name.startswith("kv_canary"))
        return outcome | {"hooked": hasattr(scheduler, "_kv_canary"), "loaded": loaded}
    snapshot = verify_at_least(guard, pages)
    return outcome | {
        "hooked": True,
        "state": snapshot.state,
        "incidents": [told(one) for one in real_incidents(guard)],
        "errors": dict(snapshot.errors),
        "verified": sum(group.counters.verified_pages for group in snapshot.groups),
        "superseded": sum(group.counters.superseded for group in snapshot.groups),
        "claims": max(group.counters.claims for group in snapshot.groups),
        "claims_not_covered": max(group.counters.claims_not_covered for group in snapshot.groups),
        "groups": {
            group.name: {
                "kind": group.kind,
                "enabled": group.enabled,
                "reason": group.disabled_reason,
                "unknown": group.pages["unknown"],
                "sealed": group.counters.sealed_pages,
                "uncovered": [(one.name, one.reason) for one in group.uncovered],
            }
            for group in snapshot.groups
        },
        "url": snapshot.url,
    }


def _count_calls(owner: Any, name: str) -> list[int]:
    calls: list[int] = []
    original = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    setattr(owner, name, counted)
    return calls


def pressure(model: Path) -> Outcome:
    """A cache for a quarter of what is asked for: preemption, eviction, chunked prefill."""
    return _traffic(model, rounds=6, pages=40_000, kv_cache_memory_bytes=36 * (64 << 10))


def drafts(model: Path) -> Outcome:
    """n-gram drafts, most of which are rejected."""
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    return _traffic(model, rounds=4, pages=40_000, speculative_config=speculation)


def hybrid(model: Path) -> Outcome:
    return _traffic(model, rounds=4, pages=40_000)


def hybrid_faults(model: Path) -> Outcome:
    """A bit flipped in each layer of each group, in a block that the group holds."""
    llm = engine.start_engine(model)
    guard = guard_of(llm)
    generate(llm, prompts_of_traffic(16, 0))
    found = []
    for one in guard.sidecar._canary._guards:
        guard.sidecar.settle()
        states = guard.ledger.states(0, guard.ledger.pages)
        pages = [int(page) for page in one.verifier.select(0, one.group.pages) if states[page] == 2]
        for number, buffer in enumerate(one.group.buffers):
            page = pages[number]
            known = len(real_incidents(guard))
            with nobody_reading(guard):
                flip(buffer, page, buffer.run_bytes - 1, bit=7)
            incidents = wait_for_incident(guard, known)
            with nobody_reading(guard):
                flip(buffer, page, buffer.run_bytes - 1, bit=7)
            found.append(
                {"group": one.group.name, "page": page, "layer": buffer.layer, "told": [told(i) for i in incidents]}
            )
    return {"found": found}


def faults(model: Path) -> Outcome:
    """Every kind of fault, one after the other, on a live engine."""
    llm = engine.start_engine(model)
    guard, scheduler = guard_of(llm), scheduler_of(llm)
    pool = scheduler.kv_cache_manager.block_pool
    prompts = prompts_of_traffic(16, 3)
    before = generate(llm, prompts)
    outcome: Outcome = {"clean": [told(one) for one in real_incidents(guard)]}

    # one bit: every layer, the first and the last sealed page, the first and the last byte
    flips = []
    for buffer in buffers_of(guard, "full"):
        pages = sealed_pages(guard)
        for page in (pages[0], pages[-1]):
            for byte in (0, buffer.run_bytes - 1):
                known = len(real_incidents(guard))
                with nobody_reading(guard):
                    flip(buffer, page, byte, bit=3)
                incidents = wait_for_incident(guard, known)
                with nobody_reading(guard):
                    flip(buffer, page, byte, bit=3)
                flips.append({"layer": buffer.layer, "page": page, "told": [told(one) for one in incidents]})
    outcome["flips"] = flips

    # the owner of a page that a running request holds
    outcome["owned"] = _flip_under_a_running_request(llm, guard)

    # late writes: into a block that is free and forgotten, and into one that waits in the prefix cache
    buffer = buffers_of(guard, "full")[0]
    generate(llm, [[5] * 40], new_tokens=2)
    generate(llm, [[6] * 8], new_tokens=2)  # an empty step delivers the frees of the one before
    guard.sidecar.settle()
    late = {}
    for kind, cached in (("forgotten", False), ("cached", True)):
        block = next(
            block
            for block in reversed(pool.blocks)
            if not block.is_null and block.ref_cnt == 0 and (block.block_hash is not None) == cached
        )
        known = len(real_incidents(guard))
        with nobody_reading(guard):
            flip(buffer, block.block_id, 100)
        late[kind] = [told(one) for one in wait_for_incident(guard, known)]
        with nobody_reading(guard):
            flip(buffer, block.block_id, 100)
    outcome["late"] = late

    # a phantom hit: the hash of one prefix is made to point at a block that holds other tokens
    first, second = [11] * 70, [12] * 70
    generate(llm, [first, second], new_tokens=2)
    known = len(real_incidents(guard))
    _point_at_the_blocks_of(pool, scheduler, llm, of=first, at=second)
    generate(llm, [[*first, 13, 14]], new_tokens=2)
    outcome["phantom"] = [told(one) for one in wait_for_incident(guard, known)]
    llm.reset_prefix_cache()

    # a block in the free queue although a request holds it
    known = len(real_incidents(guard))
    outcome["twice"] = _put_a_held_block_into_the_free_queue(llm, scheduler, pool, guard, known)

    # afterwards all is as before
    llm.reset_prefix_cache()
    known = len(real_incidents(guard))
    outcome["same_tokens"] = generate(llm, prompts) == before
    outcome["after"] = [told(one) for one in real_incidents(guard)[known:]]
    outcome["errors"] = dict(guard.sidecar.settle().errors)
    return outcome


def _start(llm: Any, prompt: list[int], request_id: str, new_tokens: int) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)


def _finish(llm: Any) -> None:
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def _flip_under_a_running_request(llm: Any, guard: Any) -> Outcome:
    _start(llm, [7] * 70, "holder", 60)
    for _ in range(8):
        llm.llm_engine.step()
    request_id = next(name for name in scheduler_of(llm).requests if name.startswith("holder"))
    manager = scheduler_of(llm).kv_cache_manager.coordinator.single_type_managers[0]
    page = manager.req_to_blocks[request_id][1].block_id
    guard.sidecar.settle()
    buffer = buffers_of(guard, "full")[-1]
    known = len(real_incidents(guard))
    with nobody_reading(guard):
        flip(buffer, page, 17)
    incidents = wait_for_incident(guard, known)
    with nobody_reading(guard):
        flip(buffer, page, 17)
    _finish(llm)
    return {"request": request_id, "page": page, "layer": buffer.layer, "told": [told(one) for one in incidents]}


def _point_at_the_blocks_of(pool: Any, scheduler: Any, llm: Any, *, of: list[int], at: list[int]) -> None:
    """As if the block had been recycled and the map still had its old hash."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    def blocks(prompt: list[int]) -> list[Any]:
        request = Request("probe", [*prompt, 1], SamplingParams(max_tokens=1), None, block_hasher=hasher)
        found, _, _ = scheduler.kv_cache_manager.get_computed_blocks(request)
        assert found.blocks[0], "the prefix is not cached"
        return list(found.blocks[0])

    hasher = llm.llm_engine.engine_core.engine_core.request_block_hasher
    own, other = blocks(of), blocks(at)
    key = own[0].block_hash
    pool.cached_block_hash_to_block.pop(key, own[0].block_id)
    pool.cached_block_hash_to_block.insert(key, other[0])


def _put_a_held_block_into_the_free_queue(llm: Any, scheduler: Any, pool: Any, guard: Any, known: int) -> Outcome:
    _start(llm, [21] * 40, "first", 40)
    for _ in range(3):
        llm.llm_engine.step()
    request_id = next(name for name in scheduler.requests if name.startswith("first"))
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    block = manager.req_to_blocks[request_id][1]
    block.ref_cnt = 0
    pool.free_block_queue.prepend_n([block])
    _start(llm, [22] * 20, "second", 4)
    for _ in range(3):
        llm.llm_engine.step()
    incidents = wait_for_incident(guard, known)
    block.ref_cnt = max(block.ref_cnt, 2)  # both will give it back
    _finish(llm)
    return {"page": block.block_id, "told": [told(one) for one in incidents]}


def quarantine(model: Path) -> Outcome:
    """A bad block in a cached prefix of an idle engine: claimed it gives a wrong answer, in quarantine it is not."""
    from kv_canary.commands import PatchSettings

    llm = engine.start_engine(model)
    guard = guard_of(llm)
    pool = scheduler_of(llm).kv_cache_manager.block_pool
    prompt = prompts_of_traffic(1, 9)[0] + prompts_of_traffic(8, 9)[7] + [9, 10, 11]
    right = [generate(llm, [prompt]), generate(llm, [prompt])]  # computed, and from the cache
    buffer = buffers_of(guard, "full")[0]

    def spoil(page: int) -> None:
        with nobody_reading(guard):
            for byte in range(1, buffer.run_bytes, 2):  # the upper half of each bfloat16: an exponent far too big
                flip(buffer, page, byte, bit=6)

    def cached_block() -> int:
        return next(block.block_id for block in pool.blocks if block.block_hash is not None and block.ref_cnt == 0)

    bad = cached_block()
    spoil(bad)
    wait_for_incident(guard, 0)
    wrong = generate(llm, [prompt])
    spoil(bad)
    llm.reset_prefix_cache()
    generate(llm, [prompt])

    guard.sidecar.submit(PatchSettings(changes={"on_mismatch": "quarantine"})).result(10)
    known = len(real_incidents(guard))
    bad = cached_block()
    spoil(bad)
    asked = [told(one) for one in wait_for_incident(guard, known)]
    answer = generate(llm, [prompt])
    return {
        "right": right,
        "wrong": wrong,
        "answer": answer,
        "page": bad,
        "asked": asked,
        "done": [told(one) for one in real_incidents(guard)[known:]],
        "still_cached": pool.blocks[bad].block_hash is not None,
    }


def processes(model: Path) -> Outcome:
    """The engine core is a process of its own: a bit flipped there in each layer, told from there."""
    llm = engine.start_engine(model, processes=True, worker_extension_cls="worker_extension.FaultInjection")
    for seed in range(3):
        generate(llm, prompts_of_traffic(16, seed))
    clean = llm.collective_rpc("canary_report", args=(20_000,))[0]
    pages = llm.collective_rpc("canary_pages")[0]
    found = []
    for layer, page in zip(pages["layers"], (pages["pages"][0], pages["pages"][-1]), strict=True):
        llm.collective_rpc("canary_flip", args=(0, page, layer, 9, 0x10))
        incidents = llm.collective_rpc("canary_wait", args=(len(found),))[0]
        llm.collective_rpc("canary_flip", args=(0, page, layer, 9, 0x10))
        found.append({"layer": layer, "page": page, "told": incidents})
    return {"clean": clean, "found": found}


def raising(model: Path) -> Outcome:
    llm = engine.start_engine(model)
    guard = guard_of(llm)
    prompts = prompts_of_traffic(8, 1)
    generate(llm, prompts)
    page = sealed_pages(guard)[0]
    with nobody_reading(guard):
        flip(buffers_of(guard, "full")[0], page, 5)
    incidents = wait_for_incident(guard, 0)
    try:
        generate(llm, prompts)
    except Exception as error:  # noqa: BLE001 - told to the test
        return {"error": type(error).__name__, "message": str(error), "incident": incidents[0].id}
    return {"error": None}


def broken_hooks(model: Path) -> Outcome:
    """Hooks that throw, in both halves: the server goes on, the group is off with its reason until it is on again."""
    from kv_canary.commands import SetGroupEnabled

    llm = engine.start_engine(model)
    guard, scheduler = guard_of(llm), scheduler_of(llm)
    prompts = prompts_of_traffic(12, 5)
    tokens = [generate(llm, prompts)]
    reasons = []
    for owner, name in ((scheduler._kv_canary, "_tell_writes"), (guard.ledger, "write")):
        llm.reset_prefix_cache()
        original = getattr(owner, name)

        def broken(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("broken on purpose")

        setattr(owner, name, broken)
        tokens.append(generate(llm, prompts))
        time.sleep(0.1)
        group = guard.sidecar.settle().groups[0]
        reasons.append([group.enabled, group.disabled_reason])
        setattr(owner, name, original)
        guard.sidecar.submit(SetGroupEnabled(group="full", enabled=True)).result(10)
        llm.reset_prefix_cache()
        tokens.append(generate(llm, prompts))
    snapshot = guard.sidecar.settle()
    return {
        "tokens": tokens,
        "reasons": reasons,
        "enabled": snapshot.groups[0].enabled,
        "recording": guard.gate.recording,
        "unknown": snapshot.groups[0].pages["unknown"],
        "errors": dict(snapshot.errors),
        "incidents": [told(one) for one in real_incidents(guard)],
    }


def switches(model: Path) -> Outcome:
    """Off and on under load, a reset of the prefix cache under load, and memory that is lost in a sleep."""
    from kv_canary.commands import SetEnabled

    llm = engine.start_engine(model)
    guard, scheduler = guard_of(llm), scheduler_of(llm)
    prompts = prompts_of_traffic(24, 7)
    outcome: Outcome = {}

    def under_load(action: Any) -> None:
        for number, prompt in enumerate(prompts):
            _start(llm, prompt, f"{time.monotonic()}-{number}", 20)
        for _ in range(6):
            llm.llm_engine.step()
        action()
        _finish(llm)

    def off_and_on() -> None:
        guard.sidecar.submit(SetEnabled(enabled=False)).result(10)
        for _ in range(4):
            llm.llm_engine.step()
        outcome["off"] = [guard.gate.recording, scheduler._kv_canary.gate.recording]
        guard.sidecar.submit(SetEnabled(enabled=True)).result(10)

    under_load(off_and_on)
    # a scheduler that stops recording without being asked by this worker: the worker notices and asks again
    under_load(lambda: scheduler._kv_canary.gate.close())
    outcome["on"] = [guard.gate.recording, scheduler._kv_canary.gate.recording]
    outcome["unknown"] = guard.sidecar.settle().groups[0].pages["unknown"]
    under_load(lambda: outcome.update(reset=llm.reset_prefix_cache(reset_running_requests=True)))

    buffer = buffers_of(guard, "full")[0]

    def garble(*args: Any) -> None:
        ctypes_fill(buffer)

    guard._around_sleep(garble)(1)
    suspended = guard.sidecar.settle()
    outcome["asleep"] = [suspended.state, suspended.reason]
    llm.reset_prefix_cache()
    guard._around_wake(lambda tags=None: None)(["weights"])
    outcome["half_awake"] = guard.sidecar.settle().reason
    guard._around_wake(lambda tags=None: None)(None)
    under_load(lambda: None)
    snapshot = verify_at_least(guard, guard.sidecar.settle().groups[0].counters.verified_pages + 2000)
    outcome["awake"] = [snapshot.state, snapshot.reason, guard.gate.recording]
    outcome["incidents"] = [told(one) for one in real_incidents(guard)]
    outcome["errors"] = dict(snapshot.errors)
    return outcome


def ctypes_fill(buffer: Any) -> None:
    import ctypes

    size = (buffer.pages - 1) * buffer.page_stride + buffer.run_bytes
    ctypes.memset(buffer.address, 0xA5, size)


def misfit(model: Path) -> Outcome:
    """A vLLM in which a hook target is missing: it serves, and nothing of it is touched."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    before = Scheduler.__init__
    del KVCacheManager.pop_blocks_for_free  # used with KV connectors only
    return _unguarded(engine.start_engine(model)) | {"touched": Scheduler.__init__ is not before}


def bad_setting(model: Path) -> Outcome:
    import os

    os.environ["KV_CANARY_BUDGET"] = "a lot"
    return _unguarded(engine.start_engine(model))


def _unguarded(llm: Any) -> Outcome:
    answers = generate(llm, prompts_of_traffic(2, 0), new_tokens=4)
    return {"answers": len(answers), "guarded": guard_of(llm) is not None}


def connector(model: Path) -> Outcome:
    """A KV connector: the server starts, nothing is guarded, and the reason is said."""
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(model.parent / "connector")},
    )
    llm = engine.start_engine(model, kv_transfer_config=transfer)
    generate(llm, prompts_of_traffic(6, 0))
    guard = guard_of(llm)
    snapshot = guard.sidecar.settle()
    group = snapshot.groups[0]
    return {
        "enabled": group.enabled,
        "reason": group.disabled_reason,
        "uncovered": [one.name for one in group.uncovered],
        "incidents": len(real_incidents(guard)),
        "steps": guard.gate.recording,
    }


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        pressure,
        drafts,
        hybrid,
        hybrid_faults,
        faults,
        quarantine,
        processes,
        raising,
        broken_hooks,
        switches,
        connector,
        misfit,
        bad_setting,
    )
}

if __name__ == "__main__":
    result = SCENARIOS[sys.argv[1]](Path(sys.argv[2]))
    print("\n" + json.dumps(result), flush=True)
