"""The Triton kernels of the GPU backend. Importing this module imports triton; nothing is compiled before the first
launch.

A program takes a tile of pages and one stripe. The keys of a block of words are loaded once for all pages of the tile,
and a word costs one multiplication and about ten simple instructions, so reading the memory is all there is to it.
Parameters have no annotations because Triton reads those that are there.
"""

import triton
import triton.language as tl

from kv_canary.ledger import states

# How the words of a page are found: all in one run, through a table of byte offsets of words, or byte by byte.
CONTIGUOUS, WORDS, BYTES = range(3)
SEALED, FREE = tl.constexpr(states.SEALED), tl.constexpr(states.FREE)
BUFFER_COLUMNS = 5  # address of page 0, stride from page to page, bytes of a page, index of its first key, first offset


@triton.jit
def _term(word, key):
    v = word ^ key
    return (v & 0xFFFFFFFF) * (v >> 32) + ((word << 32) | (word >> 32))


@triton.jit
def _splitmix(value):
    z = value + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _gathered(base, offsets, w, size, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Words put together from bytes that may lie anywhere, zero-padded behind `size` bytes; uint64 [TILE, BLOCK]."""
    word = tl.zeros((TILE, BLOCK), tl.uint64)
    for byte in tl.static_range(8):
        there = (8 * w + byte) < size
        offset = tl.load(offsets + 8 * w + byte, mask=there, other=0)
        address = (base[:, None] + offset[None, :]).to(tl.pointer_type(tl.uint8))
        value = tl.load(address, mask=there[None, :], other=0).to(tl.uint64)
        word |= value << (8 * byte)
    return word


@triton.jit
def _stands(state, generation, baseline, page, inside):
    """Which pages have a fingerprint that holds for them now; bool, as `page`."""
    known = tl.load(state + page, mask=inside, other=0)
    live = tl.load(generation + page, mask=inside, other=0)
    return inside & ((known == SEALED) | (known == FREE)) & (tl.load(baseline + page, mask=inside, other=-1) == live)


# a number that is 1, or divisible by 16, would otherwise be compiled for anew: in front of the engine
@triton.jit(do_not_specialize=["page_count", "first_page"])
def fingerprint_kernel(
    pages,
    page_count,
    first_page,
    state,
    generation,
    baseline,
    buffers,
    offsets,
    starts,
    lengths,
    keys,
    stripe_count,
    table,
    result,
    difference_count,
    difference_rows,
    difference_stripes,
    capacity,
    VERIFY: tl.constexpr,
    RANGE: tl.constexpr,
    MODE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    KEY_ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Without VERIFY: `result[row, stripe]` is the fingerprint of page `pages[row]`.

    With VERIFY: it is compared with `table[page, stripe]`, and only differences are appended, to `difference_rows`,
    `difference_stripes` and `result` (what was found); `difference_count[0]` counts them even beyond `capacity`.

    With RANGE: row r is page `first_page + r`, and a page is read only if its `state` is sealed or free and the
    generation that its fingerprint was taken for (`baseline`) is the live one. `difference_count[1]` counts pages that
    were read. Nothing is written for a page.
    """
    stripe = tl.program_id(1)
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = rows < page_count
    buffer_start, buffer_stop = tl.load(starts + stripe), tl.load(starts + stripe + 1)
    # rows that are not wanted read a page again that is: no mask on loads
    if RANGE:
        page = first_page + rows.to(tl.int64)
        live = _stands(state, generation, baseline, page, live)
        page = tl.where(live, page, tl.max(tl.where(live, page, 0), axis=0))
        wanted = tl.sum(live.to(tl.int32), axis=0)
        buffer_stop = tl.where(wanted > 0, buffer_stop, buffer_start)
        tl.atomic_add(difference_count + 1, wanted, mask=(stripe == 0) & (wanted > 0))
    else:
        page = tl.load(pages + tl.where(live, rows, 0))
    total = tl.zeros((TILE, BLOCK), tl.uint64)
    for buffer in range(buffer_start, buffer_stop):
        column = buffers + buffer * 5
        base = tl.load(column) + page * tl.load(column + 1)
        size = tl.load(column + 2)
        key = tl.multiple_of(keys + tl.load(column + 3), KEY_ALIGNMENT)
        places = offsets + tl.load(column + 4)
        start = tl.multiple_of(base.to(tl.pointer_type(tl.uint64)), ALIGNMENT)
        words = (size + 7) // 8
        whole = words // BLOCK * BLOCK
        for first in range(0, whole, BLOCK):
            w = first + tl.arange(0, BLOCK)
            k = tl.load(key + w).to(tl.uint64, bitcast=True)
            if MODE == 0:
                x = tl.load(start[:, None] + w[None, :])
            elif MODE == 1:
                offset = tl.load(places + w)
                x = tl.load((base[:, None] + offset[None, :]).to(tl.pointer_type(tl.uint64)))
            else:
                x = _gathered(base, places, w, size, TILE, BLOCK)
            total += _term(x, k[None, :])
        if whole < words:
            w = whole + tl.arange(0, BLOCK)
            inside = w < words
            k = tl.load(key + w, mask=inside, other=0).to(tl.uint64, bitcast=True)
            if MODE == 0:
                x = tl.load(start[:, None] + w[None, :], mask=inside[None, :], other=0)
            elif MODE == 1:
                offset = tl.load(places + w, mask=inside, other=0)
                address = (base[:, None] + offset[None, :]).to(tl.pointer_type(tl.uint64))
                x = tl.load(address, mask=inside[None, :], other=0)
            else:
                x = _gathered(base, places, w, size, TILE, BLOCK)
            total += tl.where(inside[None, :], _term(x, k[None, :]), 0)
    length = tl.load(lengths + stripe).to(tl.uint64, bitcast=True)
    value = _splitmix(tl.sum(total, axis=1) ^ length).to(tl.int64, bitcast=True)
    if VERIFY:
        expected = tl.load(table + page * stripe_count + stripe)
        differs = live & (value != expected)
        place = tl.atomic_add(difference_count + tl.zeros((TILE,), tl.int32), 1, mask=differs)
        kept = differs & (place < capacity)
        tl.store(difference_rows + place, rows, mask=kept)
        tl.store(difference_stripes + place, tl.zeros((TILE,), tl.int32) + stripe, mask=kept)
        tl.store(result + place, value, mask=kept)
    else:
        tl.store(result + rows * stripe_count + stripe, value, mask=live)


@triton.jit(do_not_specialize=["page_count", "first_page"])
def settle_kernel(first_page, page_count, state, generation, baseline, stands, BLOCK: tl.constexpr):
    """`stands[row]`: the fingerprint of page `first_page + row` still holds; uint8. Launched behind a reading."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < page_count
    holds = _stands(state, generation, baseline, first_page + rows.to(tl.int64), inside)
    tl.store(stands + rows, holds.to(tl.uint8), mask=inside)
