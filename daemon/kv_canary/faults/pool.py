"""The reference pool: pages of KV bytes in host memory, a stream of writes that can be late, and a host tier beside it.

Nothing here knows the canary, apart from the fences that a stream gives out; `engine` tells it what happens. Everything
runs on the engine's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kv_canary.geometry import CanaryGroup, build_group, contiguous_buffer
from kv_canary.ledger import Manifest

PAGE_TOKENS = 16
LAYERS = 2
KV_ROW_BYTES, INDEX_ROW_BYTES = 64, 16  # of a token and layer: keys and values, and what an indexer keeps beside them
PARTS = (("kv", KV_ROW_BYTES), ("index", INDEX_ROW_BYTES))
PAGE_BYTES = LAYERS * PAGE_TOKENS * (KV_ROW_BYTES + INDEX_ROW_BYTES)

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Reached:
    """A fence: everything launched on the stream before it has run."""

    stream: Stream
    count: int

    def ready(self) -> bool:
        return self.stream.done >= self.count


class Stream:
    """Work in order. `run` carries it out; until then it is queued, like a kernel that has been launched."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self.launched = self.done = 0

    def launch(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self.launched += 1

    def run(self) -> None:
        while self._queue:
            self._queue.popleft()()
            self.done += 1

    def here(self) -> Reached:
        return Reached(self, self.launched)


class Pool:
    """The memory. One row a page: for each layer its KV rows, then its index rows."""

    def __init__(self, pages: int, *, seed: int) -> None:
        self.pages = pages
        self.memory = torch.zeros((pages, PAGE_BYTES), dtype=torch.uint8)
        self.bytes: Bytes = self.memory.numpy()
        self._random = np.random.default_rng(seed)
        for page in range(pages):
            self.write_rows(page, 0, PAGE_TOKENS)

    def group(self, name: str = "full") -> CanaryGroup:
        buffers = [
            contiguous_buffer(
                f"layer.{layer}.{part}",
                layer,
                self.memory,
                offset=offset(layer, part),
                pages=self.pages,
                page_stride=PAGE_BYTES,
                rows=PAGE_TOKENS,
                row_bytes=row_bytes,
                dtype=torch.bfloat16 if part == "kv" else None,
            )
            for layer in range(LAYERS)
            for part, row_bytes in PARTS
        ]
        return build_group(name, "full", buffers, coverage="all", page_tokens=PAGE_TOKENS, travels=True)

    def fresh_rows(self, count: int) -> list[Bytes]:
        """Plausible KV of `count` tokens: bfloat16 numbers around zero, one array for each layer and part."""
        numbers = self._random.standard_normal((count, PAGE_BYTES // PAGE_TOKENS // 2), np.float32)
        raw = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        parts, start = [], 0
        for _ in range(LAYERS):
            for _, row_bytes in PARTS:
                parts.append(np.ascontiguousarray(raw[:, start : start + row_bytes]).reshape(-1))
                start += row_bytes
        return parts

    def put_rows(self, page: int, first: int, rows: Sequence[Bytes]) -> None:
        """What a kernel does: the rows of some tokens, in every layer."""
        index = 0
        for layer in range(LAYERS):
            for part, row_bytes in PARTS:
                start = offset(layer, part) + first * row_bytes
                self.bytes[page, start : start + len(rows[index])] = rows[index]
                index += 1

    def write_rows(self, page: int, first: int, stop: int) -> None:
        self.put_rows(page, first, self.fresh_rows(stop - first))

    def late_write(self, page: int, first: int = 0, stop: int = 4) -> Callable[[], None]:
        """A kernel that was launched and has not run: it runs when it is called."""
        rows = self.fresh_rows(stop - first)
        return lambda: self.put_rows(page, first, rows)


def offset(layer: int, part: str) -> int:
    """Where the rows of one part of a layer begin in a page."""
    start = layer * PAGE_TOKENS * (KV_ROW_BYTES + INDEX_ROW_BYTES)
    return start if part == "kv" else start + PAGE_TOKENS * KV_ROW_BYTES


@dataclass(slots=True, kw_only=True)
class Stored:
    """A page in the tier: its bytes, and what the canary knows of them (None where it was silent)."""

    data: Bytes
    manifest: Manifest | None


@dataclass(slots=True)
class Tier:
    """Host memory for pages of requests that had to make room, by request."""

    stored: dict[str, list[Stored]] = field(default_factory=dict)
