"""Where the bytes of a page lie: page buffers, stripes and canary groups.

A page buffer sees one tensor as pages. Its bytes have two orders: the order in memory, and the *logical* order (tokens
in order, then the row of each token) that a fingerprint is taken over. The logical order does not depend on the layout,
so a page keeps its fingerprint on another device, in another tier and at another page number.

Values only; nothing here reads a byte of the pool. Built by attachers on the thread that attaches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from kv_canary.errors import GeometryError
from kv_canary.settings import Coverage
from kv_canary.snapshot import GroupKind, UncoveredBuffer

WORD = 8  # bytes
MINIMUM_STRIPE_BYTES = 16_384  # 8 bytes of fingerprint for each: 0.05% of the pool
PARTIAL_ROW_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One level of repetition inside a page: `count` items, a stride in memory and a stride in the logical order
    (bytes).
    """

    count: int
    memory_stride: int
    logical_stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageBuffer:
    """One tensor of a pool seen as pages.

    Page p is made of *runs* of `run_bytes` contiguous bytes. The run at index (i, j, ...) of `axes` starts in memory at
    `offset + p * page_stride + i * axes[0].memory_stride + ...` of the tensor's storage, and at `i *
    axes[0].logical_stride + ...` in the page's logical byte string. No axes: the page is one run.

    `tensor` is only held so that the memory stays alive while it is guarded; its shape and dtype do not matter. `dtype`
    is what the bytes are, if they are numbers of one type: only the guess at a cause looks at it.
    """

    name: str
    layer: int
    tensor: torch.Tensor
    pages: int
    page_stride: int
    run_bytes: int
    offset: int = 0
    axes: tuple[Axis, ...] = ()
    row_bytes: int | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.pages < 1 or self.run_bytes < 1 or self.page_stride < 1 or any(axis.count < 1 for axis in self.axes):
            raise GeometryError(f"{self.name}: pages, page_stride, run_bytes and axis counts must be at least 1")
        span = sum((axis.count - 1) * axis.memory_stride for axis in self.axes) + self.run_bytes
        end = self.offset + (self.pages - 1) * self.page_stride + span
        storage = self.tensor.untyped_storage().nbytes()
        if self.offset < 0 or end > storage:
            raise GeometryError(f"{self.name}: pages reach to byte {end} of a storage of {storage} bytes")
        if any(axis.memory_stride < 0 for axis in self.axes):
            raise GeometryError(f"{self.name}: a memory_stride is negative; `offset` is where the lowest run starts")
        filled = self.run_bytes
        for axis in sorted((axis for axis in self.axes if axis.count > 1), key=lambda axis: axis.logical_stride):
            if axis.logical_stride != filled:
                raise GeometryError(
                    f"{self.name}: the runs overlap or leave holes in the logical order: an axis has logical_stride "
                    f"{axis.logical_stride}, the axes inside it fill {filled} bytes"
                )
            filled *= axis.count

    @property
    def bytes_per_page(self) -> int:
        """Length of the logical byte string of one page."""
        size = self.run_bytes
        for axis in self.axes:
            size *= axis.count
        return size

    @property
    def words(self) -> int:
        """64-bit words of one page, the last one zero-padded."""
        return -(-self.bytes_per_page // WORD)

    @property
    def address(self) -> int:
        """Address of page 0's first byte."""
        return self.tensor.untyped_storage().data_ptr() + self.offset

    @property
    def device(self) -> torch.device:
        return self.tensor.device


def contiguous_buffer(
    name: str,
    layer: int,
    tensor: torch.Tensor,
    *,
    offset: int = 0,
    pages: int,
    page_stride: int,
    rows: int,
    row_bytes: int,
    dtype: torch.dtype | None = None,
) -> PageBuffer:
    """A page of `rows` token rows of `row_bytes` bytes that lie one after the other."""
    return PageBuffer(
        name=name,
        layer=layer,
        tensor=tensor,
        pages=pages,
        page_stride=page_stride,
        run_bytes=rows * row_bytes,
        offset=offset,
        row_bytes=row_bytes,
        dtype=dtype,
    )


def partial_buffer(buffer: PageBuffer) -> PageBuffer:
    """The first 16 bytes of every token row of `buffer`: coverage `partial`."""
    row = buffer.row_bytes or buffer.run_bytes
    if row <= PARTIAL_ROW_BYTES:
        return buffer
    if buffer.run_bytes % row:
        # a run is a piece of a row here (heads-first layouts): take the start of every run instead
        row = buffer.run_bytes
        if row <= PARTIAL_ROW_BYTES:
            return buffer
    inner = Axis(count=buffer.run_bytes // row, memory_stride=row, logical_stride=PARTIAL_ROW_BYTES)
    runs = 1
    outer = []
    for axis in sorted(buffer.axes, key=lambda axis: axis.logical_stride):
        outer.append(replace(axis, logical_stride=inner.count * PARTIAL_ROW_BYTES * runs))
        runs *= axis.count
    order = {id(axis): index for index, axis in enumerate(sorted(buffer.axes, key=lambda axis: axis.logical_stride))}
    axes = tuple(outer[order[id(axis)]] for axis in buffer.axes) + ((inner,) if inner.count > 1 else ())
    return replace(buffer, run_bytes=PARTIAL_ROW_BYTES, axes=axes, row_bytes=PARTIAL_ROW_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripe:
    """The page buffers that share one fingerprint, in canonical order; each is zero-padded to whole words."""

    name: str
    buffers: tuple[PageBuffer, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({buffer.layer for buffer in self.buffers}))

    @property
    def words(self) -> int:
        return sum(buffer.words for buffer in self.buffers)

    @property
    def bytes_per_page(self) -> int:
        return sum(buffer.bytes_per_page for buffer in self.buffers)


def build_stripes(buffers: Sequence[PageBuffer], *, minimum_bytes: int = MINIMUM_STRIPE_BYTES) -> tuple[Stripe, ...]:
    """Puts neighbouring small buffers together until a stripe covers at least `minimum_bytes` of a page.

    A short rest joins the stripe before it, so that no fingerprint covers less than the minimum unless the page itself
    is smaller.
    """
    parts: list[list[PageBuffer]] = []
    size = minimum_bytes
    for buffer in buffers:
        if size >= minimum_bytes:
            parts.append([])
            size = 0
        parts[-1].append(buffer)
        size += buffer.bytes_per_page
    if len(parts) > 1 and size < minimum_bytes:
        rest = parts.pop()
        parts[-1].extend(rest)
    return tuple(Stripe(name=_stripe_name(part), buffers=tuple(part)) for part in parts)


def _stripe_name(buffers: Sequence[PageBuffer]) -> str:
    first, last = buffers[0].name, buffers[-1].name
    return first if first == last else f"{first}..{last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryGroup:
    """The pages and buffers that are switched, swept and counted together.

    `pages` counts all page numbers, `first_page` is the lowest one that is ever guarded (pages below it are the
    engine's padding sink). `uncovered` names what of this group is not checked. `unguarded` is why the whole group is
    left alone: the engine uses it in a way that is not modelled, so it is off and cannot be switched on. `travels`: its
    pages are copied to tiers or peers and back, so that each buffer has a fingerprint of its own as well.
    """

    name: str
    kind: GroupKind
    pages: int
    stripes: tuple[Stripe, ...]
    first_page: int = 0
    page_tokens: int = 1
    coverage: Coverage = "all"
    uncovered: tuple[UncoveredBuffer, ...] = ()
    kv_token_id_vs_position_offset: int = 0
    unguarded: str | None = None
    travels: bool = False
    # Derived, and asked for many times a second: adding up hundreds of buffers takes longer than reading some pages.
    buffers: tuple[PageBuffer, ...] = field(init=False, repr=False, compare=False)
    bytes_per_page: int = field(init=False, repr=False, compare=False)
    device: torch.device = field(init=False, repr=False, compare=False)
    layout_signature: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        buffers = tuple(buffer for stripe in self.stripes for buffer in stripe.buffers)
        object.__setattr__(self, "buffers", buffers)
        object.__setattr__(self, "bytes_per_page", sum(stripe.bytes_per_page for stripe in self.stripes))
        object.__setattr__(self, "device", buffers[0].device if buffers else torch.device("cpu"))
        object.__setattr__(self, "layout_signature", self._signature())
        counts = {buffer.pages for buffer in self.buffers}
        if counts - {self.pages}:
            raise GeometryError(f"group {self.name}: {self.pages} pages, but its buffers have {sorted(counts)}")
        if len({buffer.device for buffer in self.buffers}) > 1:
            raise GeometryError(f"group {self.name}: its buffers lie on more than one device")

    def _signature(self) -> str:
        """16 hexadecimal digits that are equal for two groups exactly if their pages' fingerprints can be compared."""
        parts = [f"{self.kind}:{self.page_tokens}:{self.coverage}"]
        parts += [f"{s.name}=" + ",".join(f"{b.name}:{b.bytes_per_page}" for b in s.buffers) for s in self.stripes]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def unguarded_group(name: str, kind: GroupKind, *, pages: int, buffers: Sequence[str], reason: str) -> CanaryGroup:
    """A group that is listed and left alone, with its buffers named as not covered."""
    return CanaryGroup(
        name=name,
        kind=kind,
        pages=pages,
        stripes=(),
        uncovered=tuple(UncoveredBuffer(name=buffer, reason=reason) for buffer in buffers),
        unguarded=reason,
    )


def build_group(
    name: str,
    kind: GroupKind,
    buffers: Sequence[PageBuffer],
    *,
    coverage: Coverage,
    first_page: int = 0,
    page_tokens: int = 1,
    uncovered: Sequence[UncoveredBuffer] = (),
    kv_token_id_vs_position_offset: int = 0,
    minimum_stripe_bytes: int = MINIMUM_STRIPE_BYTES,
    travels: bool = False,
) -> CanaryGroup:
    """A group over `buffers` with the coverage that the settings ask for."""
    if not buffers:
        raise GeometryError(f"group {name}: it has no buffers")
    left_out: list[UncoveredBuffer] = list(uncovered)
    covered: Sequence[PageBuffer] = buffers
    if coverage == "none":
        covered = ()
        left_out += [UncoveredBuffer(name=buffer.name, reason="coverage is 'none'") for buffer in buffers]
    elif coverage == "partial":
        covered = [partial_buffer(buffer) for buffer in buffers]
        left_out += [
            UncoveredBuffer(
                name=buffer.name, reason=f"coverage is 'partial': only the first {PARTIAL_ROW_BYTES} bytes of a row"
            )
            for buffer, part in zip(buffers, covered, strict=True)
            if part is not buffer
        ]
    return CanaryGroup(
        name=name,
        kind=kind,
        pages=buffers[0].pages,
        stripes=build_stripes(covered, minimum_bytes=minimum_stripe_bytes) if covered else (),
        first_page=first_page,
        page_tokens=page_tokens,
        coverage=coverage,
        uncovered=tuple(left_out),
        kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
        travels=travels,
    )


def cut_by_buffer(group: CanaryGroup) -> CanaryGroup:
    """The same pages with a stripe for each buffer."""
    return replace(group, stripes=tuple(Stripe(name=buffer.name, buffers=(buffer,)) for buffer in group.buffers))
