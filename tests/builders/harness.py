"""A small paged pool with a ledger and a verifier, driven by the test itself: no threads, and time is a variable."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from kv_canary.findings import Finding
from kv_canary.gate import EngineGate
from kv_canary.geometry import CanaryGroup, build_group, contiguous_buffer
from kv_canary.guard import GroupGuard
from kv_canary.ledger import HostLedger
from kv_canary.verifier import Verifier


@dataclass
class ManualClock:
    """A clock that stands until it is moved."""

    now: float = 1000.0

    def time(self) -> float:
        return self.now + 1.7e9

    def monotonic(self) -> float:
        return self.now


def make_memory(pages: int = 32, layers: int = 2, page_bytes: int = 4096, seed: int = 0) -> torch.Tensor:
    """uint8 [pages, layers * page_bytes]: one page a row, one piece of it a layer."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (pages, layers * page_bytes), dtype=torch.uint8, generator=generator)


def make_group(memory: torch.Tensor, *, name: str = "full", layers: int = 2, first_page: int = 0) -> CanaryGroup:
    """One stripe a layer over `memory`."""
    pages, size = memory.shape
    part = size // layers
    buffers = [
        contiguous_buffer(
            f"layer.{layer}",
            layer,
            memory,
            offset=layer * part,
            pages=pages,
            page_stride=size,
            rows=16,
            row_bytes=part // 16,
        )
        for layer in range(layers)
    ]
    return build_group(name, "full", buffers, coverage="all", first_page=first_page, minimum_stripe_bytes=1)


@dataclass
class Harness:
    """Pool, ledger, gate and verifier; `apply` does what the canary thread does between two sweeps."""

    memory: torch.Tensor = field(default_factory=make_memory)
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        from kv_canary.fingerprint.cpu import CpuTable  # a GPU test machine may have no numba

        self.group = make_group(self.memory)
        self.ledger = HostLedger("full", len(self.memory))
        self.gate = EngineGate()
        self.gate.recording = True
        self.verifier = Verifier(
            self.group, self.ledger, CpuTable(self.group), watch=self.gate.watch, monotonic=self.clock.monotonic
        )
        self.guard = GroupGuard(verifier=self.verifier, gate=self.gate)

    def apply(self) -> None:
        assert self.ledger.catch_up(seconds=10.0)
        while (work := self.ledger.take_work()) is not None:
            if work.kind == "move":
                self.verifier.move(work)
            elif work.kind != "claim":
                self.verifier.take(*self.verifier.missing(work.pages, work.generations))

    def sealed(self, *pages: int, owner: str = "a") -> None:
        """Allocates, fills and seals pages."""
        self.ledger.allocate(list(pages), owner)
        self.ledger.seal(list(pages), list(range(1, len(pages) + 1)))
        self.apply()

    def sweep(self) -> list[Finding]:
        return self.verifier.verify(np.arange(len(self.memory)), "sweep")

    def flip(self, page: int, byte: int = 100, mask: int = 1) -> None:
        self.memory[page, byte] ^= mask
