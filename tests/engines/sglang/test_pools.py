"""Where SGLang says that a page lies and where we look: the same bytes, for every pool class, without an engine."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engines.sglang.pool_cases import Case, View, all_cases
from kv_canary.fingerprint import spec
from kv_canary.fingerprint.backends import open_table
from kv_canary.geometry import CanaryGroup, PageBuffer, Stripe
from kv_canary.registry import attach_canary_groups
from kv_canary.settings import Settings

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("published"),
]

CASES = all_cases()
CPU = torch.device("cpu")


def attach(pool: Any, **options: Any) -> tuple[CanaryGroup, ...]:
    return attach_canary_groups(pool=pool, settings=Settings(), device=CPU, **options)


class Pool:
    """A pool of a case, filled with random bytes, and what we made of it."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(zlib.crc32(case.name.encode()))
        self.case, self.pool = case, case.build()
        self.groups = {group.name: group for group in attach(self.pool)}
        self.guarded = {name: group for name, group in self.groups.items() if group.stripes}
        self.views = case.views(self.pool)
        self.buffers = {(name, buffer.name): buffer for name, group in self.guarded.items() for buffer in group.buffers}
        for storage in {id(s): s for s in (b.tensor.untyped_storage() for b in self.buffers.values())}.values():
            memory = torch.empty(0, dtype=torch.uint8).set_(storage)
            memory.random_(0, 256)

    def first_page(self, group: str) -> int:
        return self.case.first_page.get(group, 1)


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def subject(request: pytest.FixtureRequest) -> Pool:
    return Pool(request.param)


def as_bytes(view: torch.Tensor) -> bytes:
    """The bytes of a piece of a tensor in the order of memory."""
    order = sorted(range(view.dim()), key=lambda dim: -view.stride(dim))
    return view.permute(order).contiguous().flatten().view(torch.uint8).numpy().tobytes()


def flip(view: torch.Tensor, *, last: bool) -> None:
    """Flips a bit of the first or the last byte of a piece of a tensor, in memory."""
    corner = view[tuple(size - 1 if last else 0 for size in view.shape)]
    corner.unsqueeze(0).view(torch.uint8)[-1 if last else 0] ^= 0x10


def stripe_of(group: CanaryGroup, buffer: PageBuffer) -> int:
    (number,) = (n for n, stripe in enumerate(group.stripes) if buffer in stripe.buffers)
    return number


def cut(group: CanaryGroup) -> CanaryGroup:
    stripes = tuple(Stripe(name=buffer.name, buffers=(buffer,)) for buffer in group.buffers)
    return replace(group, stripes=stripes)


def test_every_tensor_of_the_pools_own_is_a_buffer_and_no_other(subject: Pool) -> None:
    assert set(subject.buffers) == set(subject.views)


def test_a_page_of_a_buffer_holds_the_bytes_of_the_pools_own_view(subject: Pool) -> None:
    for (name, part), buffer in subject.buffers.items():
        pages = subject.guarded[name].pages
        for page in {0, 1, pages // 2, pages - 1}:
            assert spec.read_page(buffer, page) == as_bytes(subject.views[name, part](page)), (name, part, page)


def test_the_sinks_pages_are_never_guarded_and_the_last_page_is_the_pools_last(subject: Pool) -> None:
    for name, group in subject.groups.items():
        assert group.first_page == subject.first_page(name), name
        if name in subject.case.pages:
            assert group.pages == subject.case.pages[name], name
    for (name, part), view in subject.views.items():
        pages = subject.guarded[name].pages
        assert name in subject.case.pages or not is_whole(view, pages, like=view(1)), (name, part)


def is_whole(view: View, page: int, *, like: torch.Tensor) -> bool:
    try:
        return view(page).shape == like.shape
    except IndexError:
        return False


@pytest.mark.parametrize("one_stripe_a_buffer", [False, True], ids=["stripes as attached", "one stripe a buffer"])
def test_a_flipped_bit_changes_the_fingerprint_of_its_page_and_its_buffers_stripe_alone(
    subject: Pool, one_stripe_a_buffer: bool
) -> None:
    groups = {name: cut(group) if one_stripe_a_buffer else group for name, group in subject.guarded.items()}
    tables = {name: open_table(group) for name, group in groups.items()}
    pages = {name: np.arange(group.pages) for name, group in groups.items()}
    before = {name: table.read(pages[name]).copy() for name, table in tables.items()}
    for (name, part), buffer in subject.buffers.items():
        group, view = groups[name], subject.views[name, part]
        stripe = stripe_of(group, buffer)
        assert buffer.layer in group.stripes[stripe].layers
        for page in (group.first_page, group.pages - 1, 0):
            for last in (False, True):
                flip(view(page), last=last)
                changed = {
                    other: np.argwhere(table.read(pages[other]) != before[other]).tolist()
                    for other, table in tables.items()
                }
                flip(view(page), last=last)
                assert changed[name] == [[page, stripe]], (name, part, page, last)
                others = [found for other, found in changed.items() if other != name and found]
                assert subject.case.shares_bytes or not others, (name, part, page, others)
    for name, table in tables.items():
        assert (table.read(pages[name]) == before[name]).all(), "what is mended reads clean again"


@pytest.mark.parametrize("case", [case for case in CASES if case.write is not None], ids=lambda case: case.name)
def test_tokens_written_through_the_pools_own_door_change_their_page_in_every_stripe_and_no_other(case: Case) -> None:
    subject = Pool(case)
    for name, group in subject.guarded.items():
        table, pages = open_table(group), np.arange(group.pages)
        for page in (group.first_page, group.pages - 1):
            slots = torch.arange(page * group.page_tokens, (page + 1) * group.page_tokens)
            before = table.read(pages).copy()
            case.write(subject.pool, name, slots)
            changed = table.read(pages) != before
            assert changed[page].all(), (name, page)
            # A state is written by a copy from slot 2, which the case fills first.
            expected = {page, 2} if group.kind == "state" else {page}
            assert set(np.flatnonzero(changed.any(axis=1)).tolist()) == expected, name


def owned_tensors(pool: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that can be reached from a pool through SGLang's own objects, with its path."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", pool)]
    while waiting:
        path, value = waiting.pop(0)
        if id(value) in seen or (path.endswith(".allocator") and path):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield path, value
        elif isinstance(value, dict):
            waiting += [(f"{path}.{key}", one) for key, one in value.items()]
        elif isinstance(value, (list, tuple)):
            waiting += [(f"{path}.{index}", one) for index, one in enumerate(value)]
        elif type(value).__module__.startswith("sglang.srt.mem_cache"):
            waiting += [(f"{path}.{key}", one) for key, one in getattr(value, "__dict__", {}).items()]
            slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
            waiting += [(f"{path}.{name}", getattr(value, name, None)) for name in slots]


def byte_offsets(tensor: torch.Tensor) -> np.ndarray:
    """Where in the storage the bytes of a tensor lie."""
    starts = np.full((), tensor.storage_offset(), np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        starts = starts[..., None] + np.arange(size) * stride
    item = tensor.element_size()
    return np.unique((starts.reshape(-1, 1) * item + np.arange(item)).ravel())


def test_every_tensor_larger_than_a_page_is_guarded_or_listed(subject: Pool) -> None:
    guarded: dict[int, np.ndarray] = {}
    for buffer in subject.buffers.values():
        storage = buffer.tensor.untyped_storage()
        mask = guarded.setdefault(storage.data_ptr(), np.zeros(storage.nbytes(), bool))
        runs = np.concatenate([memory + np.arange(buffer.run_bytes) for memory, _ in spec.run_offsets(buffer)])
        for page in range(buffer.pages):
            mask[buffer.offset + page * buffer.page_stride + runs] = True
    listed = {one.name for group in subject.groups.values() for one in group.uncovered}
    smallest = min(buffer.bytes_per_page for buffer in subject.buffers.values())
    missed = []
    for path, tensor in owned_tensors(subject.pool):
        if tensor.nbytes <= smallest or set(path.split(".")) & set(subject.case.foreign):
            continue
        names = [name for end, name in subject.case.listed.items() if path.endswith("." + end)]
        if names:
            assert set(names) <= listed, path
            continue
        offsets = byte_offsets(tensor)
        mask = guarded.get(tensor.untyped_storage().data_ptr())
        held = mask[offsets] if mask is not None else np.zeros(len(offsets), bool)
        if set(path.split(".")) & set(subject.case.raw):
            whole = held.any()
        else:
            # Behind the last page there may be rows that no page number reaches.
            whole = held.any() and held[: np.flatnonzero(held)[-1] + 1].all()
        if not whole:
            missed.append((path, tuple(tensor.shape), tensor.dtype))
    assert missed == []


def test_only_parts_of_unified_memory_share_bytes(subject: Pool) -> None:
    from kv_canary_sglang.pools import shares_bytes

    assert shares_bytes(subject.pool) == subject.case.shares_bytes
