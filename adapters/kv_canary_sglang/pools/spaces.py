"""Which page numbers a pool has, and which of them may be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SINK_PAGES = 1  # the page of slot 0 takes the writes of padded tokens

CONTEXT_PARALLEL = "decode context parallelism: the slots of a page of the allocator are spread over ranks"
NOT_BACKED = "its memory is reserved and not yet backed: the pool was attached before its size was final"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSpace:
    """`refusal` is why nothing of the pool can be guarded."""

    pages: int
    page_tokens: int
    first_page: int = SINK_PAGES
    refusal: str | None = None


def page_space(pool: Any) -> PageSpace:
    """The pages of a pool of KV rows: as many as its allocator has now, and the padding sink in front."""
    page_tokens: int = pool.page_size
    shared = shared_entry(pool)
    if shared is not None:
        memory, name = shared
        # A sub-pool with small entries has more than one page over the sink, which is as large as the largest page.
        first, pages = -(-memory.min_slot_index(name) // page_tokens), memory.max_slots(name) // page_tokens
    else:
        # Not the tensors' length: they may be longer, and then their end has no memory behind it.
        first, pages = SINK_PAGES, pool.size // page_tokens + SINK_PAGES
    return PageSpace(pages=pages, page_tokens=page_tokens, first_page=first, refusal=refusal(pool))


def slot_space(pool: Any) -> PageSpace:
    """The slots of a pool of recurrent states."""
    shared = shared_entry(pool)
    if shared is not None:
        memory, name = shared
        return PageSpace(pages=memory.max_slots(name), page_tokens=1, first_page=memory.min_slot_index(name))
    return PageSpace(pages=pool.size + SINK_PAGES, page_tokens=1)


def shared_entry(pool: Any) -> tuple[Any, str] | None:
    """The unified memory that the pool is a view of, and the sub-pool whose entries it lies in."""
    memory = getattr(pool, "_unified_buffer", None)
    if memory is None:
        return None
    return memory, getattr(pool, "_host_sub_pool_name", None) or pool._sub_pool_name


def shares_bytes(pool: Any) -> bool:
    """Whether a page of one group may lie over the bytes of a page of another: the pool is a part of unified memory.

    Only pages in use are then to be read: the bytes of a free one may belong to somebody else.
    """
    inner = (getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool", "mamba_pool"))
    return any(shared_entry(one) is not None for one in (pool, *inner) if one is not None)


def layer_ids(pool: Any) -> Sequence[int]:
    """The model's numbers of the layers whose tensors the pool holds, in the order of its lists."""
    known: Sequence[int] | None = getattr(pool, "model_layer_ids", None)
    return range(pool.start_layer, pool.start_layer + pool.layer_num) if known is None else known


def refusal(pool: Any) -> str | None:
    """Why nothing of the pool can be guarded in this process, None if it can."""
    owner = getattr(pool, "_post_capture_owner", None)
    if owner is not None and getattr(owner, "_final_num_tokens", None) is None:
        return NOT_BACKED
    # The pool of a draft model is whole on every rank, and its pages are as long as the allocator's.
    if _context_parallel_ranks() > 1 and not getattr(pool, "dcp_replicated", False):
        return CONTEXT_PARALLEL
    return None


def _context_parallel_ranks() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_dcp_size)
