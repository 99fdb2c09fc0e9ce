"""A guarded pool with a tier beside it, driven by the test itself: no threads, and time is a variable."""

from __future__ import annotations

import numpy as np
import torch

from builders.harness import ManualClock
from kv_canary import Budget, Settings
from kv_canary.canary import Canary
from kv_canary.counters import Counters
from kv_canary.findings import Finding
from kv_canary.fingerprint.backends import open_buffer_table, open_table
from kv_canary.gate import EngineGate
from kv_canary.geometry import build_group, contiguous_buffer
from kv_canary.ledger import HostLedger, Manifest
from kv_canary.publisher import Subject
from kv_canary.snapshot import Snapshot
from kv_canary.verifier import Verifier

PAGES = 16
SIZES = (512, 128)  # bytes of a page: KV, and a small tensor beside it
NAMES = ("layer.0.kv", "layer.0.index", "layer.1.kv", "layer.1.index")


class Shop:
    """One group over pages of several small buffers that share a stripe; `tier` holds what was copied out of it."""

    def __init__(
        self,
        *,
        names: tuple[str, ...] = NAMES,
        travels: bool = True,
        seed: int = 0,
        clock: ManualClock | None = None,
    ) -> None:
        self.names = names
        self.clock = clock or ManualClock()
        self._random = torch.Generator().manual_seed(seed)
        self.memory = torch.zeros((PAGES, len(names) // 2 * sum(SIZES)), dtype=torch.uint8)
        for page in range(PAGES):
            self.fill(page)
        self._places = {name: index // 2 * sum(SIZES) + index % 2 * SIZES[0] for index, name in enumerate(names)}
        buffers = [
            contiguous_buffer(
                name,
                index // 2,
                self.memory,
                offset=self._places[name],
                pages=PAGES,
                page_stride=self.memory.shape[1],
                rows=16,
                row_bytes=SIZES[index % 2] // 16,
            )
            for index, name in enumerate(names)
        ]
        self.group = build_group("full", "full", buffers, coverage="all", travels=travels)
        self.ledger = HostLedger("full", PAGES)
        self.gate = EngineGate()
        self.canary = Canary(
            Settings(enabled=True, budget=Budget(share=1.0), drill_interval=1e6),
            Subject(engine="test", engine_version="0"),
            self.clock,
            seed=0,
        )
        tables = [(self.group, open_table(self.group), open_buffer_table(self.group))]
        self.canary.take_over(self.gate, [(self.ledger, tables)], 1e9, ())
        self.gate.boundary(self)
        self.settle()
        self.tier: dict[int, torch.Tensor] = {}
        self.manifests: dict[int, Manifest] = {}

    def resync(self) -> None:
        self.ledger.reset()

    def quarantine(self, space: str, page: int) -> str:
        return ""

    def settle(self) -> Snapshot:
        return self.canary.settle()

    @property
    def verifier(self) -> Verifier:
        return self.canary._guards[0].verifier

    @property
    def counters(self) -> Counters:
        return self.verifier.counters

    def place_of(self, buffer: str) -> int:
        return self._places[buffer]

    def fill(self, page: int) -> None:
        """Other bytes, none of them by chance those from before."""
        self.memory[page] = (
            self.memory[page] + torch.randint(1, 256, self.memory[page].shape, generator=self._random)
        ).to(torch.uint8)

    def seal(self, page: int, *, identity: int) -> None:
        self.ledger.allocate([page], "a")
        self.ledger.write([page], "a")
        self.fill(page)
        self.ledger.seal([page], identity)
        self.settle()

    def free(self, page: int) -> None:
        self.ledger.release([page], "a")
        self.ledger.free([page])
        self.settle()

    def claim(self, page: int, *, identity: int) -> None:
        self.ledger.claim([page], [identity], "c")

    def offload(self, page: int) -> None:
        self.manifests[page] = self.ledger.export([page])
        self.tier[page] = self.memory[page].clone()
        self.settle()

    def restore(
        self, page: int, target: int, *, leave_out: list[str] | None = None, identity: int = 0, settled: bool = True
    ) -> int:
        """What left `page` comes back into `target`, all but some buffers."""
        self.ledger.allocate([target], "b")
        self.ledger.load([target], "b")
        for index, name in enumerate(self.names):
            if name not in (leave_out or ()):
                place = slice(self._places[name], self._places[name] + SIZES[index % 2])
                self.memory[target, place] = self.tier[page][place]
        self.ledger.admit([target], self.manifests[page], identity)
        if settled:
            self.settle()
        return target

    def findings(self) -> list[Finding]:
        return self.verifier.verify(np.arange(PAGES), "sweep")

    def sweep(self) -> None:
        for finding in self.findings():
            self.canary._finding(self.canary._guards[0], finding)
