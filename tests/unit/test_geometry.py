"""Page buffers, stripes and groups: what is refused, how small buffers are put together, and what is left uncovered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.pools import Layout, Part, make_buffer, make_group, make_pool, make_tensor
from kv_canary.errors import GeometryError
from kv_canary.fingerprint import spec
from kv_canary.geometry import Axis, build_stripes, contiguous_buffer, partial_buffer
from kv_canary.snapshot import UncoveredBuffer


def axis(count: int = 2, memory: int = 32, logical: int = 8) -> Axis:
    return Axis(count=count, memory_stride=memory, logical_stride=logical)


# Page buffers


@pytest.mark.parametrize(
    "wrong",
    [{"pages": 0}, {"run_bytes": 0}, {"page_stride": 0}, {"run_bytes": 8, "axes": (axis(count=0),)}],
    ids=["pages", "run_bytes", "page_stride", "axis count"],
)
def test_counts_below_one_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(GeometryError, match=r"layer\.0\.k: .* must be at least 1"):
        make_buffer(**wrong)


@pytest.mark.parametrize(
    ("overrides", "end"),
    [
        ({"tensor": make_tensor(255)}, 256),
        ({"tensor": make_tensor(256), "offset": 1}, 257),
        ({"tensor": make_tensor(256), "pages": 5}, 320),
        ({"tensor": make_tensor(256), "run_bytes": 8, "axes": (axis(count=3, memory=29),)}, 258),
    ],
    ids=["storage", "offset", "pages", "axis"],
)
def test_pages_that_reach_outside_the_storage_are_refused(overrides: dict[str, Any], end: int) -> None:
    size = overrides["tensor"].untyped_storage().nbytes()
    with pytest.raises(GeometryError, match=rf"layer\.0\.k: pages reach to byte {end} of a storage of {size} bytes"):
        make_buffer(**overrides)


def test_pages_may_fill_the_storage_to_its_last_byte() -> None:
    assert make_buffer(tensor=make_tensor(256)).bytes_per_page == 64


def test_the_storage_counts_not_the_view_or_the_dtype() -> None:
    view = torch.zeros(4, 16, dtype=torch.float32)[1:2]
    assert make_buffer(tensor=view).pages == 4


def test_a_negative_offset_is_refused() -> None:
    with pytest.raises(GeometryError, match="pages reach"):
        make_buffer(offset=-1)


def test_a_negative_memory_stride_is_refused() -> None:
    with pytest.raises(GeometryError, match="a memory_stride is negative"):
        make_buffer(run_bytes=8, offset=64, axes=(axis(memory=-32),))


@pytest.mark.parametrize("logical", [0, 4, 7, 9, 16, 100], ids=str)
def test_runs_that_overlap_or_leave_holes_in_the_logical_order_are_refused(logical: int) -> None:
    with pytest.raises(GeometryError, match=rf"logical_stride {logical}, the axes inside it fill 8 bytes"):
        make_buffer(run_bytes=8, axes=(axis(logical=logical),))


def test_axes_may_stand_in_any_order() -> None:
    tokens, heads = axis(count=4, memory=8, logical=16), axis(count=2, memory=32, logical=8)
    for axes in ((tokens, heads), (heads, tokens)):
        assert make_buffer(run_bytes=8, axes=axes).bytes_per_page == 64


def test_the_stride_of_an_axis_of_one_does_not_matter() -> None:
    assert make_buffer(run_bytes=8, axes=(axis(count=1, logical=999),)).bytes_per_page == 8


@pytest.mark.parametrize(("size", "words"), [(1, 1), (8, 1), (9, 2), (13, 2), (584, 73), (656, 82), (37_440, 4680)])
def test_words_round_up(size: int, words: int) -> None:
    assert make_buffer(pages=1, tensor=make_tensor(40_000), run_bytes=size).words == words


def test_the_address_is_that_of_page_zero() -> None:
    tensor = make_tensor()
    assert make_buffer(tensor=tensor, offset=13).address == tensor.data_ptr() + 13


def test_a_contiguous_buffer_is_one_run_that_knows_its_rows() -> None:
    buffer = contiguous_buffer(
        "layer.3.v", 3, make_tensor(), offset=64, pages=2, page_stride=1024, rows=16, row_bytes=32
    )
    assert (buffer.run_bytes, buffer.row_bytes, buffer.axes, buffer.layer) == (512, 32, (), 3)


# Stripes


def sized(*sizes: int) -> list[Any]:
    tensor = make_tensor(1 << 16)
    return [make_buffer(f"b{i}", layer=i, tensor=tensor, pages=1, run_bytes=size) for i, size in enumerate(sizes)]


def test_a_buffer_of_the_minimum_is_a_stripe_of_its_own() -> None:
    assert [stripe.name for stripe in build_stripes(sized(16_384, 16_384, 16_384))] == ["b0", "b1", "b2"]


def test_small_neighbours_share_a_stripe_until_the_minimum_is_reached() -> None:
    stripes = build_stripes(sized(100, 100, 100, 100), minimum_bytes=200)
    assert [(stripe.name, stripe.bytes_per_page) for stripe in stripes] == [("b0..b1", 200), ("b2..b3", 200)]


def test_a_short_rest_joins_the_stripe_before_it() -> None:
    stripes = build_stripes(sized(100, 100, 100), minimum_bytes=200)
    assert [(stripe.name, stripe.layers) for stripe in stripes] == [("b0..b2", (0, 1, 2))]


def test_a_page_below_the_minimum_has_one_stripe() -> None:
    assert [stripe.name for stripe in build_stripes(sized(16, 16))] == ["b0..b1"]


def test_every_buffer_of_a_stripe_is_padded_to_whole_words() -> None:
    (stripe,) = build_stripes(sized(13, 3))
    assert (stripe.words, stripe.bytes_per_page) == (3, 16)


def test_layers_of_a_stripe_are_named_once_and_sorted() -> None:
    k, v, other = (replace(buffer, layer=layer) for buffer, layer in zip(sized(8, 8, 8), (5, 5, 2), strict=True))
    assert build_stripes([k, v, other])[0].layers == (2, 5)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=12), minimum=st.integers(1, 400))
def test_stripes_keep_every_buffer_in_order_and_none_is_below_the_minimum(sizes: list[int], minimum: int) -> None:
    stripes = build_stripes(sized(*sizes), minimum_bytes=minimum)
    assert [b.name for stripe in stripes for b in stripe.buffers] == [f"b{i}" for i in range(len(sizes))]
    assert len(stripes) == 1 or all(stripe.bytes_per_page >= minimum for stripe in stripes)


# Coverage


def first_bytes(part: Part, content: bytes) -> bytes:
    """The first 16 bytes of every row, or of every piece of a row where rows lie in pieces."""
    row = part.heads * part.piece if part.is_one_run else part.piece
    return b"".join(content[start : start + 16] for start in range(0, len(content), row))


@pytest.mark.parametrize(
    "part",
    [
        Part(tokens=5, heads=1, piece=584),
        Part(tokens=5, heads=2, piece=64),
        Part(tokens=5, heads=1, piece=64, spacing=8),
        Part(tokens=5, heads=3, piece=40, heads_first=True),
        Part(tokens=5, heads=3, piece=40, spacing=4),
        Part(tokens=1, heads=1, piece=100),
    ],
    ids=["contiguous", "two heads a row", "strided rows", "heads first", "strided heads", "one row"],
)
def test_partial_reads_the_first_16_bytes_of_every_row(part: Part) -> None:
    pool = make_pool(Layout(parts=(part,), lead=3, gap=5))
    covered = partial_buffer(pool.group.buffers[0])
    for page in range(pool.layout.pages):
        assert spec.read_page(covered, page) == first_bytes(part, pool.logical(page)[0][0])


def test_partial_reads_every_row_of_every_run() -> None:
    """Two runs of two rows of 32 bytes: four times the first 16, in the logical order."""
    buffer = make_buffer(
        tensor=torch.arange(200, dtype=torch.uint8), pages=1, run_bytes=64, row_bytes=32, axes=(axis(2, 100, 64),)
    )
    expected = b"".join(bytes(range(start, start + 16)) for start in (0, 32, 100, 132))
    assert spec.read_page(partial_buffer(buffer), 0) == expected


@pytest.mark.parametrize(
    "part",
    [
        Part(tokens=4, heads=1, piece=16),
        Part(tokens=4, heads=1, piece=9, spacing=7),
        Part(tokens=4, heads=8, piece=8, heads_first=True),
        Part(tokens=4, heads=2, piece=16, heads_first=True),
    ],
    ids=["contiguous", "strided", "heads first, runs of 8", "heads first, runs of 16"],
)
def test_rows_or_runs_of_up_to_16_bytes_are_covered_whole_by_partial(part: Part) -> None:
    buffer = make_pool(Layout(parts=(part,))).group.buffers[0]
    assert partial_buffer(buffer) is buffer


def test_partial_lists_what_it_leaves_out() -> None:
    pool = make_pool(Layout(parts=(Part(heads=1, piece=64), Part(heads=1, piece=16))))
    group = make_group(pool.group.buffers, coverage="partial")
    assert group.uncovered == (
        UncoveredBuffer(name="layer.0", reason="coverage is 'partial': only the first 16 bytes of a row"),
    )
    assert group.bytes_per_page == 4 * 16 + 4 * 16


def test_coverage_none_covers_nothing_and_lists_everything() -> None:
    group = make_group([make_buffer("k"), make_buffer("v")], coverage="none")
    assert (group.stripes, group.bytes_per_page, group.pages, group.device.type) == ((), 0, 4, "cpu")
    assert group.uncovered == tuple(UncoveredBuffer(name=name, reason="coverage is 'none'") for name in "kv")


def test_coverage_all_leaves_nothing_out_but_what_the_attacher_names() -> None:
    named = UncoveredBuffer(name="rope", reason="not part of a page")
    assert make_group(uncovered=[named]).uncovered == (named,)
    assert make_group(uncovered=[named], coverage="none").uncovered[0] == named


# Groups


def test_buffers_of_another_number_of_pages_are_refused() -> None:
    with pytest.raises(GeometryError, match=r"group full: 4 pages, but its buffers have \[3, 4\]"):
        make_group([make_buffer("k"), make_buffer("v", pages=3)])


def test_buffers_on_two_devices_are_refused() -> None:
    with pytest.raises(GeometryError, match="group full: its buffers lie on more than one device"):
        make_group([make_buffer("k"), make_buffer("v", tensor=make_tensor(device="meta"))])


def test_a_group_without_buffers_is_refused() -> None:
    with pytest.raises(GeometryError, match="group full: it has no buffers"):
        make_group([])


def test_a_group_counts_the_bytes_of_all_its_stripes() -> None:
    group = make_group([make_buffer("k"), make_buffer("v", run_bytes=13)])
    assert (len(group.stripes), group.bytes_per_page) == (2, 77)


def test_the_layout_signature_does_not_depend_on_where_and_how_pages_lie() -> None:
    plain = Layout(parts=(Part(), Part()))
    moved = Layout(parts=(Part(heads_first=True), Part(spacing=3)), pages=9, interleaved=True, lead=5, gap=2)
    signature = make_pool(plain).group.layout_signature
    assert make_pool(moved).group.layout_signature == signature
    assert len(signature) == 16
    assert int(signature, 16) >= 0


@pytest.mark.parametrize(
    "other",
    [
        {"kind": "mla"},
        {"page_tokens": 32},
        {"coverage": "partial"},
        {"minimum_stripe_bytes": 8192},
        {"buffers": [make_buffer("k", row_bytes=16), make_buffer("w", row_bytes=16)]},
        {"buffers": [make_buffer("v", row_bytes=16), make_buffer("k", row_bytes=16)]},
        {"buffers": [make_buffer("k", row_bytes=16)]},
        {"buffers": [make_buffer("k", row_bytes=16), make_buffer("v", run_bytes=48, row_bytes=16)]},
    ],
    ids=["kind", "page tokens", "coverage", "stripes", "name", "order", "missing buffer", "bytes"],
)
def test_the_layout_signature_differs_where_fingerprints_cannot_be_compared(other: dict[str, Any]) -> None:
    buffers = [make_buffer("k", row_bytes=16), make_buffer("v", row_bytes=16)]
    assert make_group(**{"buffers": buffers} | other).layout_signature != make_group(buffers).layout_signature
