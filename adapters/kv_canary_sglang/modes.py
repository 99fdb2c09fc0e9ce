"""What of SGLang is modelled, and what is switched off with its reason. Asked once, when a scheduler is there."""

from __future__ import annotations

from typing import Any

from kv_canary_sglang.allocators import MODELLED_ALLOCATORS

STATE_REASON = "recurrent states are rewritten in place while a request runs, and are not followed yet"
DRAFT_REASON = "KV of a draft model: when its pages are complete is not modelled"

_WINDOW_ALLOCATOR = "SWATokenToKVPoolAllocator"
_CHAINED_CACHES = ("UnifiedRadixCache", "RadixCache")


def inner_allocators(allocator: Any) -> tuple[Any, Any | None]:
    """The allocator of full pages, and the one of the window's pages if the model has one."""
    if type(allocator).__name__ == _WINDOW_ALLOCATOR:
        return allocator.full_attn_allocator, allocator.swa_attn_allocator
    return allocator, None


def engine_refusal(scheduler: Any) -> str | None:
    """Why a whole engine is left alone; None: it is modelled."""
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    args = scheduler.server_args
    if not scheduler.spec_algorithm.is_none():
        return "speculative decoding: pages of drafts are written again, and when they are complete is not modelled"
    if scheduler.enable_hierarchical_cache or getattr(tree, "cache_controller", None) is not None:
        return "hierarchical cache: pages are loaded from other tiers without a forward pass"
    if scheduler.enable_lmcache or scheduler.enable_unified_cache_external_linker:
        return "an external cache: pages are loaded from it without a forward pass"
    if getattr(args, "disaggregation_mode", "null") not in (None, "null"):
        return "prefill and decode on different servers: pages arrive without a forward pass"
    if scheduler.enable_unified_memory:
        return "unified memory: pages move while they are in use"
    if scheduler.enable_hisparse:
        return "HiSparse: device slots are used again for other tokens of the same request"
    if scheduler.enable_pdmux:
        return "prefill-decode multiplexing: a step is run in pieces"
    if getattr(scheduler, "kv_shard_widening", 1) > 1:
        return "KV sharded over ranks by page: a rank holds only some of a request's pages"
    if getattr(scheduler, "dllm_config", None) is not None:
        return "diffusion model: blocks are written again until they are final"
    if scheduler.model_config.is_encoder_decoder:
        return "encoder-decoder model: KV of the encoder has slots of its own"
    full, window = inner_allocators(allocator)
    for one in (full, window):
        if one is not None and type(one).__name__ not in MODELLED_ALLOCATORS:
            return f"allocator {type(one).__qualname__} is not modelled (modelled: {', '.join(MODELLED_ALLOCATORS)})"
    if window is not None and allocator.swa_req_ring:
        return "the sliding window is a ring for each request, which is written again as it turns"
    if type(tree).__name__ not in _CHAINED_CACHES:
        return f"prefix cache {type(tree).__qualname__} is not modelled (modelled: {', '.join(_CHAINED_CACHES)})"
    return None
