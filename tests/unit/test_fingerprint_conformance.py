"""Every fingerprint backend gives the bits of the definition, whatever the layout, and the definition does not drift.

To put a backend into the suite, add it to `BACKENDS`.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.pools import Layout, Part, Pool, make_pool
from kv_canary.errors import GeometryError
from kv_canary.fingerprint import spec
from kv_canary.fingerprint.backends import open_table
from kv_canary.fingerprint.gpu import GpuTable
from kv_canary.fingerprint.table import Differences, FingerprintTable
from kv_canary.fingerprint.tensor import TensorTable
from kv_canary.geometry import CanaryGroup
from kv_canary.identity import splitmix64, splitmix64_scalar


@dataclass(frozen=True)
class Backend:
    name: str
    device: str
    open: Callable[[CanaryGroup], FingerprintTable]

    def __str__(self) -> str:
        return self.name


if importlib.util.find_spec("numba"):  # a GPU test machine may have none
    from kv_canary.fingerprint.cpu import CpuTable, exchange_byte

    cpu_backends = [
        Backend("cpu", "cpu", CpuTable),
        Backend("cpu-2-threads", "cpu", lambda group: CpuTable(group, threads=2)),
    ]
else:
    cpu_backends = []

BACKENDS = [
    *cpu_backends,
    Backend("tensor-cpu", "cpu", TensorTable),
    *(
        [Backend("tensor-cuda", "cuda", TensorTable), Backend("gpu", "cuda", GpuTable)]
        if torch.cuda.is_available()
        else [Backend("gpu-interpreted", "cpu", GpuTable)]
    ),
]
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)
some_examples = settings(max_examples=25, deadline=None)


@st.composite
def parts(draw: st.DrawFn) -> Part:
    return Part(
        tokens=draw(st.integers(1, 6)),
        heads=draw(st.integers(1, 4)),
        piece=draw(st.sampled_from([1, 3, 4, 8, 13, 16, 24, 64])),
        heads_first=draw(st.booleans()),
        spacing=draw(st.sampled_from([0, 0, 1, 3, 8])),
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return Layout(
        parts=tuple(draw(st.lists(parts(), min_size=1, max_size=4))),
        pages=draw(st.integers(2, 6)),
        interleaved=draw(st.booleans()),
        lead=draw(st.sampled_from([0, 0, 1, 4, 8, 13])),
        gap=draw(st.sampled_from([0, 0, 2, 8, 40])),
        minimum_stripe_bytes=draw(st.sampled_from([1, 64, 200, 8192])),
    )


ODD_LAYOUTS = {
    "584 bytes a token": Layout(parts=(Part(tokens=64, heads=1, piece=584),) * 2, pages=3),
    "656 bytes a token": Layout(parts=(Part(tokens=64, heads=1, piece=656),) * 2, pages=3),
    "37,440-byte pages": Layout(parts=(Part(tokens=1, heads=1, piece=37_440),) * 2, pages=3, gap=64),
    "13-byte runs": Layout(parts=(Part(tokens=7, heads=3, piece=13, spacing=3),), pages=4),
    "13-byte runs, heads first": Layout(parts=(Part(tokens=7, heads=3, piece=13, heads_first=True),), pages=4, lead=5),
    "heads first": Layout(parts=(Part(tokens=16, heads=4, piece=128, heads_first=True),), pages=4),
    "K and V side by side": Layout(parts=(Part(), Part()), interleaved=True, minimum_stripe_bytes=8192),
    "one byte": Layout(parts=(Part(tokens=1, heads=1, piece=1),), pages=2),
    "offset 4": Layout(parts=(Part(tokens=4, heads=1, piece=64),), lead=4),
}


def defined(pool: Pool, page: int) -> list[int]:
    """The fingerprints of a page by the definition, from the bytes that the builder put there."""
    return [spec.fingerprint_bytes(stripe) for stripe in pool.logical(page)]


def opened(backend: Backend, layout: Layout, seed: int = 0) -> tuple[Pool, FingerprintTable]:
    pool = make_pool(layout, seed=seed, device=backend.device)
    return pool, backend.open(pool.group)


def sealed(backend: Backend, layout: Layout, seed: int = 0) -> tuple[Pool, FingerprintTable]:
    """A pool and a table that expects what lies in it."""
    pool, table = opened(backend, layout, seed)
    pages = np.arange(layout.pages)
    table.store(pages, table.read(pages))
    return pool, table


def as_set(differences: Differences) -> set[tuple[int, int, int]]:
    found = list(zip(differences.rows.tolist(), differences.stripes.tolist(), differences.found.tolist(), strict=True))
    assert len(set(found)) == len(found), "a difference is reported twice"
    return set(found)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device is visible to torch: CUDA backends are left out"
)
def test_the_suite_runs_on_a_cuda_device() -> None:
    assert any(backend.device == "cuda" for backend in BACKENDS)


# The bits of the definition


@every_backend
@some_examples
@given(layout=layouts(), seed=st.integers(0, 1000))
def test_read_is_bit_equal_to_the_definition(backend: Backend, layout: Layout, seed: int) -> None:
    pool, table = opened(backend, layout, seed)
    found = table.read(np.arange(layout.pages))
    assert found.dtype == np.uint64
    assert found.tolist() == [defined(pool, page) for page in range(layout.pages)]


@every_backend
@pytest.mark.parametrize("name", ODD_LAYOUTS)
def test_read_is_bit_equal_in_odd_layouts(backend: Backend, name: str) -> None:
    pool, table = opened(backend, ODD_LAYOUTS[name])
    found = table.read(np.arange(pool.layout.pages))
    assert found.tolist() == [defined(pool, page) for page in range(pool.layout.pages)]


@some_examples
@given(layout=layouts())
def test_the_definition_reads_pages_where_the_builder_wrote_them(layout: Layout) -> None:
    pool = make_pool(layout)
    for page in range(layout.pages):
        for stripe, content in zip(pool.host_group.stripes, pool.logical(page), strict=True):
            assert [spec.read_page(buffer, page) for buffer in stripe.buffers] == content
            assert spec.fingerprint_page(stripe, page) == spec.fingerprint_bytes(content)


@every_backend
@some_examples
@given(layout=layouts(), data=st.data())
def test_any_order_of_pages_and_repeated_pages_give_each_its_own_row(
    backend: Backend, layout: Layout, data: st.DataObject
) -> None:
    pool, table = opened(backend, layout)
    pages = data.draw(st.lists(st.integers(0, layout.pages - 1), max_size=12))
    found = table.read(np.array(pages, np.int64))
    assert found.shape == (len(pages), len(pool.group.stripes))
    assert found.tolist() == [defined(pool, page) for page in pages]


@every_backend
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("piece", [13, 16, 128])
def test_the_same_logical_bytes_give_the_same_value_in_every_layout_and_at_every_page(
    backend: Backend, heads: int, piece: int
) -> None:
    plain = Part(tokens=5, heads=heads, piece=piece)
    values = set()
    for part in (plain, replace(plain, heads_first=True), replace(plain, spacing=3)):
        for lead, interleaved in ((0, False), (3, True)):
            layout = Layout(parts=(part,) * 2, lead=lead, interleaved=interleaved, minimum_stripe_bytes=8192)
            pool, table = opened(backend, layout, seed=lead)
            rng = np.random.default_rng(7)
            content = [rng.bytes(part.logical_bytes) for _ in layout.parts]
            for page in range(layout.pages):
                for index, data in enumerate(content):
                    pool.write(index, page, data)
            pool.sync()
            values |= set(table.read(np.arange(layout.pages)).ravel().tolist())
    assert len(values) == 1


@every_backend
@some_examples
@given(layout=layouts())
def test_zero_fingerprint_is_that_of_a_page_of_zeros(backend: Backend, layout: Layout) -> None:
    pool, table = opened(backend, layout)
    pool.memory[pool.covered()] = 0
    pool.sync()
    zeros = [spec.zero_fingerprint(stripe) for stripe in pool.group.stripes]
    assert table.read(np.array([1])).tolist() == [zeros]


# What is seen


@every_backend
@some_examples
@given(layout=layouts(), data=st.data())
def test_one_changed_bit_is_found_in_exactly_its_page_and_stripe(
    backend: Backend, layout: Layout, data: st.DataObject
) -> None:
    pool, table = sealed(backend, layout)
    pages = list(range(layout.pages))
    random.Random(1).shuffle(pages)
    page = data.draw(st.integers(0, layout.pages - 1))
    stripe, members = data.draw(st.sampled_from(list(pool.stripe_parts())))
    part = data.draw(st.sampled_from(members))
    byte = data.draw(st.integers(0, layout.parts[part].logical_bytes - 1))
    pool.memory[pool.positions(part, page)[byte]] ^= 1 << data.draw(st.integers(0, 7))
    pool.sync()
    assert as_set(table.verify(np.array(pages, np.int64))) == {(pages.index(page), stripe, defined(pool, page)[stripe])}


@every_backend
@some_examples
@given(layout=layouts(), seed=st.integers(0, 1000))
def test_bytes_that_belong_to_no_page_do_not_count(backend: Backend, layout: Layout, seed: int) -> None:
    pool, table = sealed(backend, layout)
    outside = ~pool.covered()
    pool.memory[outside] ^= np.random.default_rng(seed).integers(1, 256, int(outside.sum()), dtype=np.uint8)
    pool.sync()
    assert as_set(table.verify(np.arange(layout.pages))) == set()


@every_backend
@some_examples
@given(layout=layouts(), data=st.data())
def test_other_pages_do_not_count(backend: Backend, layout: Layout, data: st.DataObject) -> None:
    pool, table = sealed(backend, layout)
    page = data.draw(st.integers(0, layout.pages - 1))
    kept = np.zeros(len(pool.memory), bool)
    for part in range(len(layout.parts)):
        kept[pool.positions(part, page)] = True
    pool.memory[~kept] ^= 0xFF
    pool.sync()
    rows = {row for row, _, _ in as_set(table.verify(np.arange(layout.pages)))}
    assert rows == set(range(layout.pages)) - {page}


@every_backend
@pytest.mark.parametrize("heads_first", [False, True])
def test_two_words_that_trade_places_are_seen(backend: Backend, heads_first: bool) -> None:
    layout = Layout(parts=(Part(tokens=4, heads=2, piece=16, heads_first=heads_first),), pages=2)
    words = layout.parts[0].logical_bytes // 8
    for left in range(words):
        for right in range(left):
            pool, table = sealed(backend, layout)
            content = bytearray(pool.logical(0)[0][0])
            a, b = slice(8 * left, 8 * left + 8), slice(8 * right, 8 * right + 8)
            content[a], content[b] = content[b], content[a]
            pool.write(0, 0, bytes(content))
            pool.sync()
            assert [(row, stripe) for row, stripe, _ in as_set(table.verify(np.arange(2)))] == [(0, 0)]


@every_backend
@pytest.mark.parametrize("row_bytes", [8, 13, 64])
def test_pages_of_one_repeated_row_do_not_cancel(backend: Backend, row_bytes: int) -> None:
    layout = Layout(parts=(Part(tokens=64, heads=1, piece=row_bytes),), pages=256)
    pool, table = opened(backend, layout)
    for page in range(256):
        pool.write(0, page, bytes([page]) * layout.parts[0].logical_bytes)
    pool.sync()
    assert len(set(table.read(np.arange(256)).ravel().tolist())) == 256


@every_backend
def test_the_lengths_of_two_pages_of_zeros_are_told_apart(backend: Backend) -> None:
    values = set()
    for size in range(1, 40):
        pool, table = opened(backend, Layout(parts=(Part(tokens=1, heads=1, piece=size),), pages=2))
        pool.memory[:] = 0
        pool.sync()
        values.add(int(table.read(np.array([0]))[0, 0]))
    assert len(values) == 39


# verify, store, find


@every_backend
@some_examples
@given(layout=layouts(), data=st.data())
def test_verify_returns_exactly_the_rows_and_stripes_that_differ(
    backend: Backend, layout: Layout, data: st.DataObject
) -> None:
    pool, table = sealed(backend, layout)
    stripes = len(pool.group.stripes)
    cells = st.tuples(st.integers(0, layout.pages - 1), st.integers(0, stripes - 1))
    wrong = data.draw(st.sets(cells, max_size=8))
    pages = data.draw(st.lists(st.integers(0, layout.pages - 1), max_size=12))
    for page, stripe in wrong:
        row = table.expected(np.array([page])).copy()
        row[0, stripe] ^= np.uint64(1 << 63)
        table.store(np.array([page]), row)
    expected = {
        (row, stripe, defined(pool, page)[stripe])
        for row, page in enumerate(pages)
        for stripe in range(stripes)
        if (page, stripe) in wrong
    }
    assert as_set(table.verify(np.array(pages, np.int64))) == expected


@every_backend
@some_examples
@given(layout=layouts())
def test_read_and_verify_write_nothing(backend: Backend, layout: Layout) -> None:
    pool, table = sealed(backend, layout)
    pool.memory[pool.positions(0, 1)[0]] ^= 1
    pool.sync()
    pages = np.arange(layout.pages)
    bytes_before, expected_before = pool.memory.copy(), table.expected(pages).copy()
    table.read(pages)
    table.verify(pages)
    buffer = pool.group.buffers[0]
    there = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.tensor.untyped_storage())
    assert np.array_equal(there.cpu().numpy(), bytes_before)
    assert np.array_equal(table.expected(pages), expected_before)
    assert pages.tolist() == list(range(layout.pages))


@every_backend
def test_a_page_that_was_repaired_is_right_again(backend: Backend) -> None:
    pool, table = sealed(backend, Layout())
    where = pool.positions(0, 2)[5]
    for expected in (1, 0):
        pool.memory[where] ^= 0x10
        pool.sync()
        assert len(as_set(table.verify(np.arange(5)))) == expected


@every_backend
def test_find_names_the_pages_that_expect_a_fingerprint(backend: Backend) -> None:
    _, table = opened(backend, Layout())
    table.store(np.arange(5), np.array([[7, 1], [1, 7], [7, 7], [2**64 - 1, 0], [0, 0]], np.uint64))
    assert table.find(0, 7).tolist() == [0, 2]
    assert table.find(1, 7).tolist() == [1, 2]
    assert table.find(0, 2**64 - 1).tolist() == [3]
    assert table.find(0, 9).tolist() == []


@every_backend
def test_a_group_with_nothing_covered_differs_nowhere(backend: Backend) -> None:
    pool = make_pool(device=backend.device)
    table = backend.open(replace(pool.group, stripes=()))
    assert table.read(np.arange(3)).shape == (3, 0)
    assert as_set(table.verify(np.arange(3))) == set()


def test_more_differences_than_a_launch_keeps_are_cut_off_not_made_up() -> None:
    layout = Layout(parts=(Part(tokens=1, heads=1, piece=8),) * 64, pages=80)
    pool = make_pool(layout)
    table = CpuTable(pool.group)
    found = as_set(table.verify(np.arange(80)))
    assert len(found) == 4096
    expected = [defined(pool, page) for page in range(80)]
    assert all(expected[row][stripe] == value for row, stripe, value in found)


def test_two_threads_give_the_rows_in_the_order_of_the_pages() -> None:
    pool = make_pool(Layout(pages=40))
    pages = np.random.default_rng(3).permutation(40)
    found = CpuTable(pool.group, threads=2).read(pages)
    assert found.tolist() == [defined(pool, int(page)) for page in pages]


def test_the_cpu_backend_refuses_memory_that_is_not_the_cpu_s() -> None:
    pool = make_pool()
    buffers = [
        replace(b, tensor=torch.empty(len(pool.memory), dtype=torch.uint8, device="meta")) for b in pool.group.buffers
    ]
    stripes = tuple(replace(s, buffers=(b,)) for s, b in zip(pool.group.stripes, buffers, strict=True))
    with pytest.raises(GeometryError, match="group full lies on meta, not in CPU memory"):
        CpuTable(replace(pool.group, stripes=stripes))


@pytest.mark.parametrize(
    ("expected_generation", "old", "answer", "after"),
    [(3, -1, 0x0F, 0xF0), (3, 0x0F, 0x0F, 0xF0), (3, 0x0E, -2, 0x0F), (2, -1, -1, 0x0F), (2, 0x0E, -1, 0x0F)],
    ids=["any byte", "the byte expected", "another byte", "generation moved on", "both"],
)
def test_a_byte_is_exchanged_only_for_the_generation_and_the_byte_expected(
    expected_generation: int, old: int, answer: int, after: int
) -> None:
    generations, memory = np.array([9, 3]), np.array([1, 0x0F, 1], np.uint8)
    assert exchange_byte(generations, 1, expected_generation, memory.ctypes.data + 1, 0xFF, old=old) == answer
    assert memory.tolist() == [1, after, 1]


def test_open_table_picks_the_cpu_backend_for_cpu_memory() -> None:
    assert open_table(make_pool().group, threads=2).backend == "cpu"


# The definition itself


def _ramp(size: int) -> bytes:
    return bytes((7 * i + 3) % 256 for i in range(size))


GOLDEN = {
    "nothing": ([], 0xA706_DD2F_4D19_7E6F),
    "one zero byte": ([b"\0"], 0xFA2E_2EEC_B855_08D7),
    "8 zero bytes": ([bytes(8)], 0x601A_4EDF_D4EE_50A4),
    "8,192 zero bytes": ([bytes(8192)], 0x4B9E_EA0E_D599_D895),
    "8 bytes of ones": ([b"\xff" * 8], 0x76D9_16E0_9C21_B01E),
    "13-byte ramp": ([_ramp(13)], 0x2730_D05F_8BDA_FCAA),
    "584-byte ramp": ([_ramp(584)], 0x82F9_52DB_E531_050C),
    "656-byte ramp": ([_ramp(656)], 0x9C2E_DE62_0CCF_D932),
    "37,440-byte ramp": ([_ramp(37_440)], 0xB899_0A6D_B807_1604),
    "two buffers": ([_ramp(13), _ramp(3)], 0x3790_D280_B343_C07D),
    "the same bytes in one buffer": ([_ramp(13) + _ramp(3)], 0xC0C8_2749_2DD7_549B),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_definition_has_not_drifted(name: str) -> None:
    content, value = GOLDEN[name]
    assert spec.fingerprint_bytes(content) == value


def test_the_keys_have_not_drifted() -> None:
    assert spec.SEED == 0x6B76_6361_6E61_7279
    assert spec.keys(3).tolist() == [0x8594_E18C_567C_22E8, 0x2736_1352_9CD1_A461, 0xEB39_91ED_5FBD_B411]


def test_splitmix64_is_the_published_one() -> None:
    """First outputs of the generator with seed 0 (Vigna's splitmix64.c)."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    states = [i * 0x9E3779B97F4A7C15 % 2**64 for i in range(3)]
    assert [splitmix64_scalar(state) for state in states] == published
    with np.errstate(over="ignore"):
        assert splitmix64(np.array(states, np.uint64)).tolist() == published


@some_examples
@given(content=st.binary(max_size=100))
def test_the_definition_agrees_with_plain_python(content: bytes) -> None:
    mask, total = 2**64 - 1, 0
    padded = content + bytes(-len(content) % 8)
    for i in range(len(padded) // 8):
        word = int.from_bytes(padded[8 * i : 8 * i + 8], "little")
        v = word ^ splitmix64_scalar(spec.SEED + i)
        total += (v & 0xFFFFFFFF) * (v >> 32) + ((word << 32 | word >> 32) & mask)
    assert spec.fingerprint_bytes([content]) == splitmix64_scalar(total & mask ^ splitmix64_scalar(len(content)))


@some_examples
@given(words=st.lists(st.integers(0, 2**64 - 1), max_size=40), cut=st.integers(0, 40), first=st.integers(0, 1000))
def test_sums_of_chunks_add_up(words: list[int], cut: int, first: int) -> None:
    cut = min(cut, len(words))
    whole = np.array(words, np.uint64)
    left = spec.word_sum(whole[:cut], first)
    right = spec.word_sum(whole[cut:], first + cut)
    assert spec.word_sum(whole, first) == (left + right) % 2**64


def test_the_keys_of_a_chunk_are_those_of_its_place() -> None:
    assert spec.keys(10)[4:].tolist() == splitmix64(np.arange(4, 10, dtype=np.uint64) + np.uint64(spec.SEED)).tolist()
