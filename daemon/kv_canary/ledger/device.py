"""The page state machine on a CUDA device: one kernel launch an event, in the order of the engine's stream.

Runs on the engine's thread. `PageTable` in torch operations is the reference, does what is rare or large, and stands in
where there is no Triton; the ledger's tests hold the two together. Everything is compiled when the table is made.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from kv_canary.ledger.arrays import TensorArrays
from kv_canary.ledger.device_kernels import EVENTS, LEFT_ROWS, transition_kernel
from kv_canary.ledger.transitions import Flag, Left, PageTable

BLOCK = 512
WARPS = 4
LARGE = 32_768  # places: from about here on many programs are faster than one

_NOBODY = 0


class UncopiedArrays(TensorArrays):
    """`TensorArrays` for a table that copies the page numbers that it keeps itself."""

    def pages(self, pages: Any) -> Any:
        return torch.as_tensor(pages, device=self.device).to(torch.int64).reshape(-1).contiguous()


class DevicePageTable(PageTable):
    """`PageTable` in one Triton kernel an event (under Triton's interpreter, on any device).

    `violations` (int32 [pages]), `reasons` and `culprits` (int64) are where the kernel flags.
    """

    def __init__(
        self,
        pages: int,
        arrays: TensorArrays,
        flag: Flag,
        *,
        violations: torch.Tensor,
        reasons: torch.Tensor,
        culprits: torch.Tensor,
        block: int = BLOCK,
        large: int = LARGE,
    ) -> None:
        super().__init__(pages, arrays, flag)
        self._device = arrays.device
        self._pages = pages
        self._flags = (violations, reasons, culprits)
        self._block, self._large = block, large
        self._none = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._left: torch.Tensor | None = None
        for event in EVENTS:
            self._run(event, self._none, self._none, 0, _NOBODY, 0, 0, self._none)  # of no page: compiles

    def allocate(self, pages: Any, owner: Any) -> None:
        if not self._launch("allocate", pages, owner=owner):
            super().allocate(pages, owner)

    def write(self, pages: Any, owner: Any) -> None:
        if not self._launch("write", pages, owner=owner):
            super().write(pages, owner)

    def seal(self, pages: Any, identity: Any) -> None:
        if not self._launch("seal", pages, identity=identity):
            super().seal(pages, identity)

    def claim(self, pages: Any, identity: Any, owner: Any) -> None:
        if not self._launch("claim", pages, identity=identity, owner=owner):
            super().claim(pages, identity, owner)

    def reopen(self, pages: Any) -> None:
        if not self._launch("reopen", pages):
            super().reopen(pages)

    def load(self, pages: Any, owner: Any) -> None:
        if not self._launch("load", pages, owner=owner):
            super().load(pages, owner)

    def adopt(self, pages: Any, identity: Any, owner: Any, owners: Any) -> None:
        if not self._launch("adopt", pages, identity=identity, owner=owner, holders=owners):
            super().adopt(pages, identity, owner, owners)

    def release(self, pages: Any, owner: Any) -> None:
        if not self._launch("release", pages, owner=owner):
            super().release(pages, owner)

    def free(self, pages: Any) -> None:
        if not self._launch("free", pages):
            super().free(pages)

    def move(self, sources: Any, targets: Any, owner: Any) -> None:
        if not self._launch("move", targets, sources=sources, owner=owner):
            super().move(sources, targets, owner)

    def hold(self, pages: Any, identity: Any) -> None:
        if not self._launch("hold", pages, identity=identity):
            super().hold(pages, identity)

    def forget(self, pages: Any) -> None:
        if not self._launch("forget", pages):
            super().forget(pages)

    def left(self, *columns: Any) -> list[Left]:
        """As the kernel wrote them down: no further pass, and no copy of the engine's page numbers."""
        if self._left is None:
            return super().left(*(pages.clone() for pages in columns))
        return [(self._left[2 * index], self._left[2 * index + 1]) for index in range(len(columns))]

    def moved(self, targets: Any, sources: Any) -> list[Left]:
        return super().moved(targets, sources) if self._left is None else self.left(targets, sources)

    def _launch(
        self,
        event: str,
        pages: torch.Tensor,
        *,
        sources: torch.Tensor | None = None,
        owner: Any = _NOBODY,
        identity: Any = 0,
        holders: Any = 0,
    ) -> bool:
        """False: it is for the reference to do."""
        count = len(pages)
        self._left = None
        if count > self._large or (sources is not None and len(sources) != count):
            return False
        rows = LEFT_ROWS.get(event, 0)
        left = torch.empty((rows, count), dtype=torch.int64, device=self._device) if rows else self._none
        if count:
            self._run(event, pages, pages if sources is None else sources, count, owner, identity, holders, left)
        if rows:
            self._left = left
        return True

    def _run(
        self,
        event: str,
        pages: torch.Tensor,
        sources: torch.Tensor,
        count: int,
        owner: Any,
        identity: Any,
        holders: Any,
        left: torch.Tensor,
    ) -> None:
        kernel: Any = transition_kernel
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            kernel[(1,)](
                pages,
                sources,
                count,
                self._pages,
                self.step,
                *self._given(owner, count),
                *self._given(identity, count),
                *self._given(holders, count),
                left,
                self.state,
                self.generation,
                self.owners,
                self.owner,
                self.previous_owner,
                self.identity,
                self.claim_identity,
                self.written_step,
                self.changed_step,
                self._marks,
                self.claims_not_covered,
                *self._flags,
                EVENT=event,
                BLOCK=self._block,
                num_warps=WARPS,
                num_stages=1,
            )

    def _given(self, value: Any, count: int) -> tuple[int, torch.Tensor, int]:
        """A value for all places as (value, -, 0), one a place as (0, values, distance from one to the next)."""
        if isinstance(value, (int, np.integer)):
            return int(value), self._none, 0
        values = value.reshape(-1).to(torch.int64)
        if len(values) not in (1, count):
            raise ValueError(f"{len(values)} values for {count} pages: give one, or one a page")
        return 0, values, values.stride(0) if len(values) > 1 else 0
