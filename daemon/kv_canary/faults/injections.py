"""The injections: each breaks the reference engine in one way and returns the pages that it spoils.

They run between two steps of the engine, on its thread, and stop where the fault is done: finding it is the canary's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kv_canary.faults.engine import Request
from kv_canary.faults.pool import KV_ROW_BYTES, LAYERS, PAGE_TOKENS, Stored, offset
from kv_canary.faults.stage import Stage, must

Inject = Callable[[Stage], set[int]]
Page = npt.NDArray[np.uint8]


# Late and stray writes


def _victim(stage: Stage, *, id: str = "victim", tokens: int = 3 * PAGE_TOKENS + 2) -> Request:
    """A request in the middle of its life, with complete pages."""
    request = stage.engine.submit(stage.prompt(tokens), 200, id=id)
    stage.steps(4)
    must(request.sealed >= 2, "the victim has complete pages")
    return request


def _give_to(stage: Stage, page: int, owner: str) -> Request:
    """`page`, which is free, goes to a new request, which fills and completes it."""
    stage.engine.free.remove(page)
    stage.engine.free.insert(0, page)
    request = stage.engine.submit(stage.prompt(), 200, id=owner)
    stage.steps(4)
    must(page in request.pages[: request.sealed], "the next owner completes the page")
    return request


def late_after_reallocation(stage: Stage) -> set[int]:
    old = _victim(stage, id="request-a")
    page = old.pages[-1]  # open: its last kernel is still under way
    late = stage.engine.pool.late_write(page)
    stage.engine.cancel(old)
    _give_to(stage, page, "request-b")
    stage.settle()
    late()
    return {page}


def remote_write_into_a_free_page(stage: Stage) -> set[int]:
    old = _victim(stage, id="remote")
    page = old.pages[-1]
    late = stage.engine.pool.late_write(page, 0, PAGE_TOKENS)
    stage.engine.cancel(old)
    stage.settle()
    late()
    return {page}


def remote_write_into_the_next_owner(stage: Stage) -> set[int]:
    old = _victim(stage, id="remote")
    page = old.pages[-1]
    late = stage.engine.pool.late_write(page, 0, PAGE_TOKENS)
    stage.engine.cancel(old)
    _give_to(stage, page, "next")
    stage.settle()
    late()
    return {page}


def stale_block_table_seen(stage: Stage) -> set[int]:
    """The adapter reads the same table as the kernel."""
    one, other = _victim(stage, id="batch-1"), _victim(stage, id="batch-2")
    page = other.pages[0]
    stage.engine.begin_step()
    stage.engine.ledger.write([page], one.id)
    stage.engine.pool.write_rows(page, 0, 1)
    return {page}


def stale_block_table_unseen(stage: Stage) -> set[int]:
    """The device reads a table that the host has overwritten: nobody is told of the page that it writes."""
    _victim(stage, id="batch-1")
    other = _victim(stage, id="batch-2")
    stage.settle()
    stage.engine.pool.write_rows(other.pages[0], 3, 4)
    return {other.pages[0]}


def padding_slot(stage: Stage) -> set[int]:
    stage.settle()
    stage.engine.pool.put_rows(-1, PAGE_TOKENS - 1, stage.engine.pool.fresh_rows(1))
    return {stage.engine.pool.pages - 1}


# Ownership and identity


def double_free(stage: Stage) -> set[int]:
    """Its accounting stays balanced: as many pages as it thinks it has."""
    engine = stage.engine
    page = engine.free[0]
    engine.free.insert(1, page)
    engine.free.pop()
    engine.submit(stage.prompt(), 8)
    stage.steps(3)
    return {page}


def phantom_hit(stage: Stage) -> set[int]:
    engine, tokens = stage.engine, stage.prompt()
    stage.serve(engine.submit(tokens, 2))
    remembered, keys = dict(engine.cached), dict(engine.key_of)
    engine.evict(engine.pool.pages)
    stage.serve(engine.submit(stage.prompt(), 2))
    engine.evict(engine.pool.pages)
    fresh = _victim(stage, id="new-owner", tokens=20 * PAGE_TOKENS)
    engine.cached.update(remembered)  # the map still points at the recycled pages
    engine.key_of.update(keys)
    request = engine.submit(tokens, 2, id="reader")
    wrong = set(request.pages)
    must(bool(wrong & {*fresh.pages, *engine.free}), "the map points at recycled pages")
    engine.active.pop(request.id)  # it reads them; what it would go on to do is another fault
    return wrong


def keys_of_sixteen_bits(stage: Stage) -> set[int]:
    """The key is made of the placeholder tokens alone, so two requests with different images meet on it."""
    engine = stage.engine
    engine.key = lambda identity, tokens: hash(tuple(tokens)) & 0xFFFF
    tokens = [9] * (3 * PAGE_TOKENS + 1)
    stage.serve(engine.submit(tokens, 2, salt="image-1"))
    request = engine.submit(tokens, 2, salt="image-2", id="image-2")
    must(bool(request.pages), "the second request hits the pages of the first")
    return set(request.pages)


# Tiers


def _in_the_tier(stage: Stage) -> Request:
    """A request whose complete pages lie in the tier, and other tokens in the pages that come next."""
    request = _victim(stage, id="offloaded")
    stage.serve(stage.engine.submit(stage.prompt(), 2))
    stage.engine.offload(request)
    stage.steps(2)
    stage.settle()
    return request


def load_before_a_queued_write(stage: Stage, *, verified: bool) -> set[int]:
    request = _in_the_tier(stage)
    old = _victim(stage, id="old-owner")
    page = old.pages[-1]
    late = stage.engine.pool.late_write(page)  # queued on another stream than the load
    stage.engine.cancel(old)
    stage.engine.free.remove(page)
    stage.engine.free.insert(0, page)
    stage.engine.begin_step()
    must(stage.engine.restore(request)[0] == page, "the load goes into the page of the old owner")
    if verified:
        stage.settle()
    late()
    return {page}


def copied_too_early(stage: Stage) -> set[int]:
    """The copy to the tier is made before the kernel that writes the page has run."""
    engine = stage.engine
    request = _victim(stage, id="offloaded")
    stale = engine.pool.bytes[request.pages[0]].copy()
    stale[: 4 * KV_ROW_BYTES] = 0  # what the page held before that kernel
    engine.offload(request)
    engine.tier.stored[request.id][0].data = stale
    stage.steps(3)
    return {engine.restore(request)[0]}


def only_kv_comes_back(stage: Stage) -> set[int]:
    request = _in_the_tier(stage)

    def fetch_kv(page: int, stored: Stored) -> None:
        for layer in range(LAYERS):
            start = offset(layer, "kv")
            rows = slice(start, start + PAGE_TOKENS * KV_ROW_BYTES)
            stage.engine.pool.bytes[page, rows] = stored.data[rows]

    return set(stage.engine.restore(request, copy=fetch_kv))


def nothing_comes_back(stage: Stage) -> set[int]:
    return set(stage.engine.restore(_in_the_tier(stage), copy=lambda page, stored: None))


def nothing_comes_back_and_nobody_is_told(stage: Stage) -> set[int]:
    """The failed read is counted as a hit of the cache: a claim of the page that was to be loaded into."""
    engine = stage.engine
    request = _in_the_tier(stage)
    stale = next(page for page in engine.cached.values() if not engine.holders[page])
    engine.claim(request, [stale], request.identities[:1])
    return {stale}


def another_packing(stage: Stage) -> set[int]:
    """K and V of a head side by side, read back one after the other: as many bytes, in another order."""
    request = _in_the_tier(stage)

    def fetch_packed(page: int, stored: Stored) -> None:
        data = stored.data.copy()
        for layer in range(LAYERS):
            start, size = offset(layer, "kv"), PAGE_TOKENS * KV_ROW_BYTES
            rows = data[start : start + size].reshape(PAGE_TOKENS, 2, KV_ROW_BYTES // 2)
            data[start : start + size] = rows.transpose(1, 0, 2).reshape(-1)
        stage.engine.pool.bytes[page] = data

    return set(stage.engine.restore(request, copy=fetch_packed))


# Bytes


def _sealed_page(stage: Stage) -> int:
    stage.settle()
    return _victim(stage, id="holder").pages[1]


def spoil(change: Callable[[Stage, Page], None]) -> Inject:
    def inject(stage: Stage) -> set[int]:
        page = _sealed_page(stage)
        stage.settle()
        change(stage, stage.engine.pool.bytes[page])
        return {page}

    return inject


def one_bit(stage: Stage, page: Page) -> None:
    page[stage.random.randrange(len(page))] ^= 1 << stage.random.randrange(8)


def two_top_bits(stage: Stage, page: Page) -> None:
    for word in stage.random.sample(range(len(page) // 8), 2):
        page[8 * word + 7] ^= 0x80


def burst(stage: Stage, page: Page) -> None:
    start = stage.random.randrange(len(page) - 32)
    # finite numbers stay finite, or that would be said instead
    page[start : start + 32] ^= np.array([stage.random.randrange(1, 64) for _ in range(32)], np.uint8)


def row_zeroed(stage: Stage, page: Page) -> None:
    start = offset(1, "kv") + stage.random.randrange(PAGE_TOKENS) * KV_ROW_BYTES
    page[start : start + KV_ROW_BYTES] = 0


def rows_traded(stage: Stage, page: Page) -> None:
    start = offset(0, "kv")
    one, other = (start + row * KV_ROW_BYTES for row in stage.random.sample(range(PAGE_TOKENS), 2))
    kept = page[one : one + KV_ROW_BYTES].copy()
    page[one : one + KV_ROW_BYTES] = page[other : other + KV_ROW_BYTES]
    page[other : other + KV_ROW_BYTES] = kept


def not_a_number(stage: Stage, page: Page) -> None:
    start = offset(0, "kv") + 5 * KV_ROW_BYTES
    page[start : start + 8] = np.frombuffer(b"\xc0\x7f" * 4, np.uint8)  # bfloat16


def page_copied_over(stage: Stage) -> set[int]:
    request = _victim(stage, id="holder")
    stage.settle()
    stage.engine.pool.bytes[request.pages[1]] = stage.engine.pool.bytes[request.pages[0]]
    return {request.pages[1]}
