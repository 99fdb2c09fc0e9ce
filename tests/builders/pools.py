"""Builders of pools: memory with pages in it, in the layouts that engines use, and overrides for what a test is about.

All memory is one uint8 array on the host (`Pool.memory`). A pool for another device is a copy of it; `Pool.sync` brings
what a test changed over. Where a page's bytes lie is written here once more, with plain loops and by coordinates, so
that a test does not ask the code under test where to look.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kv_canary.geometry import Axis, CanaryGroup, PageBuffer, build_group

Bytes = npt.NDArray[np.uint8]


def make_tensor(size: int = 4096, **overrides: Any) -> torch.Tensor:
    return torch.zeros(size, **{"dtype": torch.uint8} | overrides)


def make_buffer(name: str = "layer.0.k", **overrides: Any) -> PageBuffer:
    """Four pages of 64 bytes, one after the other."""
    values: dict[str, Any] = {"layer": 0, "pages": 4, "page_stride": 64, "run_bytes": 64}
    values |= overrides
    values.setdefault("tensor", make_tensor())
    return PageBuffer(name=name, **values)


def make_group(buffers: Sequence[PageBuffer] | None = None, **overrides: Any) -> CanaryGroup:
    values: dict[str, Any] = {"name": "full", "kind": "full", "coverage": "all", "minimum_stripe_bytes": 1} | overrides
    buffers = (make_buffer(),) if buffers is None else buffers
    return build_group(values.pop("name"), values.pop("kind"), buffers, **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One buffer of a page: `tokens` x `heads` pieces of `piece` bytes.

    In memory the pieces lie tokens first (as in the logical string) or heads first, `spacing` bytes between two of
    them. Without spacing and tokens first the page is one run.
    """

    tokens: int = 4
    heads: int = 2
    piece: int = 16
    heads_first: bool = False
    spacing: int = 0

    @property
    def logical_bytes(self) -> int:
        return self.tokens * self.heads * self.piece

    @property
    def memory_bytes(self) -> int:
        return self.tokens * self.heads * (self.piece + self.spacing) - self.spacing

    def positions(self) -> list[int]:
        """For each byte of the logical string, where it lies from the part's start."""
        step = self.piece + self.spacing
        out = []
        for token in range(self.tokens):
            for head in range(self.heads):
                slot = head * self.tokens + token if self.heads_first else token * self.heads + head
                out += range(slot * step, slot * step + self.piece)
        return out

    @property
    def is_one_run(self) -> bool:
        return not self.spacing and not (self.heads_first and self.heads > 1 and self.tokens > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parts, page after page (`interleaved`: all parts of a page lie side by side) or part after part."""

    parts: tuple[Part, ...] = (Part(), Part())
    pages: int = 5
    interleaved: bool = False
    lead: int = 0  # bytes in front of everything
    gap: int = 0  # bytes between two pages
    minimum_stripe_bytes: int = 1


@dataclass(slots=True, kw_only=True)
class Pool:
    """A layout put into memory, on the host and (the same memory, or a copy) on a device."""

    layout: Layout
    memory: Bytes
    group: CanaryGroup
    host_group: CanaryGroup
    _device_memory: torch.Tensor
    _starts: list[int] = field(default_factory=list)
    _strides: list[int] = field(default_factory=list)

    def sync(self) -> None:
        """Brings the host's bytes to the device."""
        if self._device_memory.device.type != "cpu":
            self._device_memory.copy_(torch.from_numpy(self.memory))

    def positions(self, part: int, page: int) -> npt.NDArray[np.int64]:
        """Indices into `memory` of the logical bytes of one part of one page."""
        start = self._starts[part] + page * self._strides[part]
        return start + np.array(self.layout.parts[part].positions(), np.int64)

    def stripe_parts(self) -> Iterator[tuple[int, list[int]]]:
        """(stripe, the parts that it covers)."""
        part = 0
        for index, stripe in enumerate(self.group.stripes):
            yield index, list(range(part, part + len(stripe.buffers)))
            part += len(stripe.buffers)

    def logical(self, page: int) -> list[list[bytes]]:
        """For each stripe the logical bytes of its buffers."""
        return [
            [self.memory[self.positions(part, page)].tobytes() for part in parts] for _, parts in self.stripe_parts()
        ]

    def write(self, part: int, page: int, data: bytes) -> None:
        """Puts a logical byte string where it belongs."""
        self.memory[self.positions(part, page)] = np.frombuffer(data, np.uint8)

    def covered(self) -> npt.NDArray[np.bool_]:
        """Which bytes of `memory` belong to some page."""
        mask = np.zeros(len(self.memory), bool)
        for part in range(len(self.layout.parts)):
            for page in range(self.layout.pages):
                mask[self.positions(part, page)] = True
        return mask


def make_pool(layout: Layout | None = None, *, seed: int = 0, device: str = "cpu", **overrides: Any) -> Pool:
    """A pool of random bytes."""
    layout = Layout(**overrides) if layout is None else layout
    sizes = [part.memory_bytes for part in layout.parts]
    starts, strides = [], []
    if layout.interleaved:
        starts = [layout.lead + sum(sizes[:index]) for index in range(len(sizes))]
        strides = [sum(sizes) + layout.gap] * len(sizes)
        total = layout.lead + layout.pages * strides[0]
    else:
        total = layout.lead
        for size in sizes:
            starts.append(total)
            strides.append(size + layout.gap)
            total += layout.pages * strides[-1]
    # One spare byte: a page never ends with the storage, so reading past it is seen as a value, not as a crash.
    memory = np.random.default_rng(seed).integers(0, 256, total + 1, dtype=np.uint8)
    host = torch.from_numpy(memory)
    there = host if device == "cpu" else host.to(device)

    def group(tensor: torch.Tensor) -> CanaryGroup:
        buffers = [
            _buffer(index, part, tensor, layout.pages, start, stride)
            for index, (part, start, stride) in enumerate(zip(layout.parts, starts, strides, strict=True))
        ]
        return make_group(buffers, minimum_stripe_bytes=layout.minimum_stripe_bytes)

    return Pool(
        layout=layout,
        memory=memory,
        group=group(there),
        host_group=group(host),
        _device_memory=there,
        _starts=starts,
        _strides=strides,
    )


def _buffer(index: int, part: Part, tensor: torch.Tensor, pages: int, start: int, stride: int) -> PageBuffer:
    axes: tuple[Axis, ...] = ()
    run = part.logical_bytes
    if not part.is_one_run:
        step, run = part.piece + part.spacing, part.piece
        token_stride, head_stride = (step, part.tokens * step) if part.heads_first else (part.heads * step, step)
        tokens = Axis(count=part.tokens, memory_stride=token_stride, logical_stride=part.heads * part.piece)
        heads = Axis(count=part.heads, memory_stride=head_stride, logical_stride=part.piece)
        axes = (heads, tokens) if part.heads_first else (tokens, heads)
    return PageBuffer(
        name=f"layer.{index}",
        layer=index,
        tensor=tensor,
        pages=pages,
        page_stride=stride,
        run_bytes=run,
        offset=start,
        axes=axes,
        row_bytes=part.heads * part.piece,
    )
