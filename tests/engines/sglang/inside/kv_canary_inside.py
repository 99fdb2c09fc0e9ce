"""A plugin for tests, loaded by SGLang itself: does inside the scheduler's process what a test asks for over a socket.

`TEST_INSIDE` names the socket; each scheduler adds its rank. A request is a line of JSON, `[function, arguments]`;
the functions are those of this module that begin with `do_`. They run on the scheduler's thread between two steps, as a
fault of the engine would; those of `WAITING` on the thread of the socket, because they wait for the canary.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import socket
import threading
import time
from concurrent.futures import Future
from typing import Any

_tasks: queue.SimpleQueue[tuple[Any, Future[Any]]] = queue.SimpleQueue()
_scheduler: Any = None
_reading: Any = None


def register() -> None:
    if "TEST_INSIDE" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", _ready, HookType.AFTER)


def _ready(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    global _scheduler
    from sglang.srt.runtime_context import get_parallel

    _scheduler = scheduler
    original = scheduler.get_next_batch_to_run

    def next_batch(*args: Any, **kwargs: Any) -> Any:
        while not _tasks.empty():
            action, future = _tasks.get()
            try:
                future.set_result(action())
            except BaseException as error:  # noqa: BLE001 - told to the test
                future.set_exception(error)
        return original(*args, **kwargs)

    scheduler.get_next_batch_to_run = next_batch
    path = f"{os.environ['TEST_INSIDE']}.{get_parallel().tp_rank}"
    threading.Thread(target=_serve, args=(path,), daemon=True).start()


def _serve(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as stream:
                for line in stream:
                    stream.write(json.dumps(_answer(*json.loads(line))) + "\n")
                    stream.flush()


def _answer(name: str, arguments: list[Any]) -> Any:
    action = lambda: globals()[f"do_{name}"](*arguments)  # noqa: E731
    try:
        if name in WAITING:
            return ["done", action()]
        future: Future[Any] = Future()
        _tasks.put((action, future))
        return ["done", future.result(60)]
    except BaseException as error:  # noqa: BLE001 - told to the test
        return ["failed", f"{type(error).__name__}: {error}"]


def _guard() -> Any:
    return getattr(_scheduler, "kv_canary", None)


def _guards() -> dict[str, Any]:
    return {one.group.name: one for one in _guard().sidecar._canary._guards}


# Waiting


def do_report(pages: int = 0, seconds: float = 120) -> dict[str, Any] | None:
    """What the canary has seen, once it has verified so many pages."""
    if _guard() is None:
        return None
    until = time.monotonic() + seconds
    while True:
        snapshot = _guard().sidecar.settle()
        verified = sum(group.counters.verified_pages for group in snapshot.groups)
        if verified >= pages or time.monotonic() > until:
            break
        time.sleep(0.05)
    return {
        "url": snapshot.url,
        "state": snapshot.state,
        "reason": snapshot.reason,
        "recording": _guard().gate.recording,
        "audits": _guard().audit.walks if _guard().refusal is None else 0,
        "errors": dict(snapshot.errors),
        "verified": verified,
        "superseded": sum(group.counters.superseded for group in snapshot.groups),
        "incidents": _told(),
        "groups": {
            group.name: {
                "kind": group.kind,
                "enabled": group.enabled,
                "reason": group.disabled_reason,
                "pages": dict(group.pages),
                "claims": group.counters.claims,
                "claims_not_covered": group.counters.claims_not_covered,
                "sealed": group.counters.sealed_pages,
                "uncovered": [(one.name, one.reason) for one in group.uncovered],
            }
            for group in snapshot.groups
        },
        "hook_seconds": dict(snapshot.hook_seconds),
    }


def do_wait_for_incidents(known: int, seconds: float = 30) -> list[dict[str, Any]]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if len(told := _told()) > known:
            time.sleep(0.2)  # what belongs together comes together
            return _told()[known:] or told[known:]
        time.sleep(0.02)
    return []


def do_sealed(group: str) -> list[int]:
    """Pages that are sealed and have a fingerprint."""
    _guard().sidecar.settle()
    one = _guards()[group]
    states = one.ledger.states(0, one.group.pages)
    return [int(page) for page in one.verifier.select(0, one.group.pages) if states[page] == 2]


def do_free(group: str) -> list[int]:
    _guard().sidecar.settle()
    one = _guards()[group]
    states = one.ledger.states(0, one.group.pages)
    return [int(page) for page in one.verifier.select(0, one.group.pages) if states[page] == 3]


def do_settle() -> None:
    _guard().sidecar.settle()


def do_flip(group: str, buffer: int, page: int, byte: int, bit: int) -> int:
    """Flips one bit of a page while nobody reads; the layer. `byte` below 0 counts from the end of the page's run."""
    found = _guards()[group].group.buffers[buffer]
    byte %= found.run_bytes
    assert _guard().sidecar.suspend("a test changes bytes", 30)
    try:
        address = found.address + page * found.page_stride + byte
        (ctypes.c_uint8 * 1).from_address(address)[0] ^= 1 << bit
    finally:
        _guard().sidecar.resume("a test changes bytes")
    return int(found.layer)


def do_spoil(group: str, page: int) -> None:
    """Makes a page's numbers absurd: another bit in the exponent of each bfloat16. Twice: as before."""
    assert _guard().sidecar.suspend("a test changes bytes", 30)
    try:
        for found in _guards()[group].group.buffers:
            start = found.address + page * found.page_stride
            data = (ctypes.c_uint8 * found.run_bytes).from_address(start)
            for byte in range(1, found.run_bytes, 2):
                data[byte] ^= 1 << 6
    finally:
        _guard().sidecar.resume("a test changes bytes")


def do_buffers(group: str) -> list[int]:
    """Layers of a group's buffers."""
    return [buffer.layer for buffer in _guards()[group].group.buffers]


def do_set(**changes: Any) -> None:
    from kv_canary.commands import PatchSettings

    _guard().sidecar.submit(PatchSettings(changes=changes)).result(10)


def do_react(on_mismatch: str) -> None:
    do_set(on_mismatch=on_mismatch)


def do_switch(enabled: bool) -> None:
    from kv_canary.commands import SetEnabled

    _guard().sidecar.submit(SetEnabled(enabled=enabled)).result(10)


WAITING = {"report", "wait_for_incidents", "sealed", "free", "settle", "flip", "spoil", "buffers", "react", "switch"}


def _told() -> list[dict[str, Any]]:
    return [
        {
            "check": one.check,
            "group": one.group,
            "page": one.page,
            "layers": list(one.layers),
            "persistence": one.persistence,
            "owner": one.owner,
            "previous_owner": one.previous_owner,
            "state": one.page_state,
            "cause": one.cause,
            "summary": one.summary,
            "reaction": one.reaction,
        }
        for one in _guard().sidecar.settle().incidents
        if one.source == "real"
    ]


# On the scheduler's thread


def do_running() -> list[dict[str, Any]]:
    """Requests that run, with their slots."""
    table = _scheduler.req_to_token_pool.req_to_token
    return [
        {"rid": req.rid, "slots": table[req.kv.req_pool_idx, : req.kv.kv_committed_len].tolist()}
        for req in _scheduler.running_batch.reqs
        if req.kv.holds_kv
    ]


def do_match(tokens: list[int]) -> list[int]:
    """Slots that the prefix cache has for these tokens."""
    from array import array

    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tree = _scheduler.tree_cache
    found = tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
    slots: list[int] = tree.path_device_indices(found.last_device_node).tolist()
    return slots


def do_free_twice() -> int:
    """Takes two pages and returns one of them twice: the number of free pages is right, so SGLang's own check of its
    pool is content. The page.
    """
    allocator = _scheduler.token_to_kv_pool_allocator
    slots = allocator.alloc(2 * allocator.page_size)
    page = slots[:1] // allocator.page_size
    allocator.free_page_ids(page)
    allocator.free_page_ids(page.clone())
    return int(page)


def do_repoint(tokens: list[int], slots: list[int]) -> None:
    """Makes the tree's node for `tokens` point at other slots, as if its own had been recycled."""
    from array import array

    import torch
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    tree = _scheduler.tree_cache
    found = tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
    node = tree.tree_core.node_by_id(found.last_device_node)
    value = node.component_data[ComponentType.FULL].value
    value.copy_(torch.tensor(slots[-len(value) :], dtype=value.dtype))


def do_swap_window(first: int, second: int) -> None:
    """Two full slots trade their slots of the window."""
    mapping = _scheduler.token_to_kv_pool_allocator.full_to_swa_index_mapping
    one, other = mapping[first].clone(), mapping[second].clone()
    mapping[first], mapping[second] = other, one


def do_window_of(slots: list[int]) -> list[int]:
    found: list[int] = _scheduler.token_to_kv_pool_allocator.full_to_swa_index_mapping[slots].tolist()
    return found


def do_audit() -> int:
    guard = _guard()
    guard.audit.run()
    return int(guard.audit.walks)


def do_break(owner: str, name: str) -> None:
    """Has a method of the guard's throw; `space` is the full ledger."""
    target = {"ledger": _guard().gate.ledgers["slots"]}[owner]

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken on purpose")

    setattr(target, name, broken)


def do_mend(owner: str, name: str) -> None:
    delattr({"ledger": _guard().gate.ledgers["slots"]}[owner], name)


def do_loaded() -> list[str]:
    import sys

    of_tests = {"kv_canary_inside", "kv_canary_cpu_stubs"}  # this plugin, and what make_env.sh puts into every process
    return sorted(name for name in sys.modules.keys() - of_tests if name.startswith("kv_canary"))
