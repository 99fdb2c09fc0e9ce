"""Which vLLM this adapter was written for, and the self-check: every hook target exists and takes what is expected.

A vLLM that does not fit is named in one line and left alone.
"""

from __future__ import annotations

from typing import Any

from kv_canary.errors import UnsupportedEngineError
from kv_canary.hooks import expect_method

OLDEST = (0, 32)
NEWEST_TESTED = "0.32.0"
SUPPORTED = f"{OLDEST[0]}.{OLDEST[1]} and later releases whose hook targets are the same (tested: {NEWEST_TESTED})"


def check_version() -> str:
    """The installed version of vLLM; `UnsupportedEngineError` if it is too old."""
    import vllm

    version: str = vllm.__version__
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        return version  # a build of one's own: the targets decide
    if (major, minor) < OLDEST:
        raise UnsupportedEngineError(f"vLLM {version} is not supported; kv-canary supports {SUPPORTED}")
    return version


def hook_classes() -> tuple[Any, Any]:
    """`Scheduler` and `WorkerWrapperBase`, checked; raises `UnsupportedEngineError`."""
    try:
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
        from vllm.v1.kv_cache_interface import compute_layout_strides
        from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase
    except ImportError as error:
        raise UnsupportedEngineError(f"a hook target is missing: {error}") from error
    expect_method(Scheduler, "schedule", ())
    expect_method(KVCacheManager, "allocate_slots", ("request", "num_new_tokens", "num_new_computed_tokens"))
    expect_method(KVCacheManager, "free", ("request",))
    expect_method(KVCacheManager, "pop_blocks_for_free", ("request",))
    expect_method(KVCacheManager, "evict_blocks", ("block_ids",))
    expect_method(SingleTypeKVCacheManager, "allocate_new_blocks", ("request_id",))
    expect_method(
        SingleTypeKVCacheManager,
        "add_local_computed_blocks",
        ("request_id", "new_computed_blocks", "num_local_computed_tokens", "num_external_computed_tokens"),
    )
    expect_method(SingleTypeKVCacheManager, "get_num_skipped_tokens", ("num_computed_tokens",))
    expect_method(BlockPool, "get_new_blocks", ("num_blocks",))
    expect_method(BlockPool, "touch", ("blocks",))
    expect_method(BlockPool, "free_blocks", ("ordered_blocks",))
    expect_method(BlockPool, "evict_blocks", ("block_ids",))
    expect_method(BlockPool, "reset_prefix_cache", ())
    expect_method(WorkerWrapperBase, "initialize_from_config", ("kv_cache_configs",))
    expect_method(WorkerWrapperBase, "execute_model", ("scheduler_output",))
    expect_method(WorkerWrapperBase, "shutdown", ())
    expect_method(WorkerBase, "compile_or_warm_up_model", ())
    if not callable(compute_layout_strides):
        raise UnsupportedEngineError("vllm.v1.kv_cache_interface.compute_layout_strides is no function")
    return Scheduler, WorkerWrapperBase
