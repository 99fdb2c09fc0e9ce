"""Which SGLang this adapter fits, and whether the one that is here looks like it."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kv_canary.errors import UnsupportedEngineError
from kv_canary.hooks import expect_method
from kv_canary_sglang.modes import inner_allocators

logger = logging.getLogger("kv_canary")

TESTED = ("0.5.23",)
SUPPORTED = "0.5.23"


def check_version() -> str:
    """The installed version; an older one is refused, a newer one is tried: `check_targets` decides."""
    try:
        found = version("sglang")
    except PackageNotFoundError as error:
        raise UnsupportedEngineError("sglang is not installed") from error
    if _numbers(found) < _numbers(SUPPORTED):
        raise UnsupportedEngineError(f"SGLang {found} is too old: {SUPPORTED} and later are supported")
    if found not in TESTED:
        logger.warning("SGLang %s was not tested with this version of KV Canary (tested: %s)", found, ", ".join(TESTED))
    return found


def hook_registry() -> tuple[Any, Any]:
    """SGLang's registry of hooks, and its word for "behind the original"."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    return HookRegistry, HookType.AFTER


def check_targets(scheduler: Any) -> None:
    """Raises `UnsupportedEngineError` unless all that is hooked on a scheduler exists and takes what is expected.

    SGLang itself only logs a hook whose target does not resolve.
    """
    runner, allocator = scheduler.tp_worker.model_runner, scheduler.token_to_kv_pool_allocator
    rows, tree = scheduler.req_to_token_pool, scheduler.tree_cache
    expect_method(scheduler, "get_next_batch_to_run", ())
    expect_method(runner, "forward", ("forward_batch",))
    for one in inner_allocators(allocator):
        if one is not None:
            _check_allocator(one)
    expect_method(rows, "alloc", ("reqs",))
    expect_method(rows, "free_rows", ("indices",))
    expect_method(rows, "clear", ())
    expect_method(tree, "prefix_device_indices", ("req",))
    expect_method(tree, "match_prefix", ("params",))
    expect_method(tree, "checkpoint", ("req",))
    for owner, name in (
        (rows, "req_to_token"),
        (scheduler, "running_batch"),
        (scheduler, "forward_ct"),
        (scheduler, "waiting_queue"),
    ):
        if not hasattr(owner, name):
            raise UnsupportedEngineError(f"{type(owner).__qualname__} has no {name}")


def _check_allocator(allocator: Any) -> None:
    expect_method(allocator, "alloc", ("need_size",))
    expect_method(allocator, "free", ("free_index",))
    expect_method(allocator, "clear", ())
    if allocator.page_size > 1:
        expect_method(allocator, "alloc_extend", ("prefix_lens", "prefix_lens_cpu", "seq_lens", "seq_lens_cpu"))
        expect_method(allocator, "alloc_decode", ("seq_lens", "seq_lens_cpu", "last_loc"))
        expect_method(allocator, "_release_page_ids", ("page_ids",))


def _numbers(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.split("."):
        digits = "".join(character for character in part if character.isdigit())
        if not part[:1].isdigit():
            break
        numbers.append(int(digits))
    return tuple(numbers)
