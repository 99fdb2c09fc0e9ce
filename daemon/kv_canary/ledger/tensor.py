"""The ledger of an engine whose page numbers are tensors on the pool's device: the columns live there, in stream order.

Who writes what. The engine's thread applies every event to the `PageTable` at once, as operations on its current
stream, so the table changes in the order in which the writes follow; it appends the work that events leave. The canary
thread reads the columns and writes none of them. A violation cannot be looked at on the host without waiting, so it is
counted in a column (`violations`, written by the engine) and the canary thread compares the counts with those it saw
last: no update is lost, though several at one page between two looks are reported as one.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kv_canary.ledger.arrays import TensorArrays
from kv_canary.ledger.base import LedgerRow, OwnerNames, PageArray, WorkQueue
from kv_canary.ledger.columns import PageColumns
from kv_canary.ledger.manifest import Manifest
from kv_canary.ledger.reading import TableReader
from kv_canary.ledger.states import FREE, SEALED, Reason, Violation
from kv_canary.ledger.transitions import PageTable
from kv_canary.ledger.work import Fence, Work
from kv_canary.streams import lowest_stream, on_stream

logger = logging.getLogger("kv_canary")


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceWork(Work):
    """Work whose page numbers are there once the engine's stream has come as far as `written`."""

    written: torch.cuda.Event | None


class TensorLedger(TableReader):
    """`Ledger` for device tensors of page numbers, int64 on `device`."""

    def __init__(
        self,
        name: str,
        pages: int,
        device: torch.device,
        *,
        names: OwnerNames | None = None,
        padding: int = -1,
        kernels: bool | None = None,
        **options: int,
    ) -> None:
        """`names` are shared with other ledgers of the same requests. `padding` is a page number that stands for none,
        so that an engine can leave pages out without knowing on the host which: no event means anything there.
        `kernels`: whether events are Triton kernels; None: on a CUDA device, if they compile. `options`: theirs.
        """
        self.name = name
        self.pages = pages
        self.device = device
        self._arrays = TensorArrays(device)
        self._violations = self._arrays.zeros(pages, "int32")
        # one entry more than pages: a sink for what is no violation
        self._reason = self._arrays.zeros(pages + 1, "int64")
        self._culprit = self._arrays.zeros(pages + 1, "int64")
        self._seen = np.zeros(pages, np.int32)
        self._names = names or OwnerNames()
        self._padding = padding
        self._work = WorkQueue()
        self._next: Work | None = None  # taken from the queue, and not there yet
        self._stream = lowest_stream(device)  # of the canary thread
        self._table = self._open_table(kernels, options)
        if self._stream is not None:
            torch.cuda.synchronize(device)  # the columns are there, whichever stream the engine works on

    def _open_table(self, kernels: bool | None, options: dict[str, int]) -> PageTable:
        if kernels or (kernels is None and self.device.type == "cuda"):
            try:
                from kv_canary.ledger.device import DevicePageTable, UncopiedArrays

                arrays = UncopiedArrays(self.device)
                table = DevicePageTable(
                    self.pages,
                    arrays,
                    self._flag,
                    violations=self._violations,
                    reasons=self._reason,
                    culprits=self._culprit,
                    **options,
                )
            except Exception as error:
                if kernels:
                    raise
                logger.warning("ledger %s: an event takes a dozen torch operations: %s", self.name, error)
            else:
                self._arrays = arrays
                return table
        return PageTable(self.pages, self._arrays, self._flag)

    # Engine's thread

    def step(self, number: int | None = None) -> None:
        self._table.step = self._table.step + 1 if number is None else number

    def allocate(self, pages: Any, owner: Any = 0, *, group: int = 0) -> None:
        self._table.allocate(self._arrays.pages(pages), self._owner(owner))

    def write(self, pages: Any, owner: Any = 0) -> None:
        self._table.write(self._arrays.pages(pages), self._owner(owner))

    def seal(self, pages: Any, identity: Any = 0, *, fence: Fence | None = None) -> None:
        pages = self._arrays.pages(pages)
        self._table.seal(pages, self._identity(identity))
        self._leave("seal", pages, fence)

    def claim(self, pages: Any, identity: Any = 0, owner: Any = 0) -> None:
        pages = self._arrays.pages(pages)
        self._table.claim(pages, self._identity(identity), self._owner(owner))
        self._leave("claim", pages, None)

    def reopen(self, pages: Any) -> None:
        self._table.reopen(self._arrays.pages(pages))

    def adopt(
        self,
        pages: Any,
        identity: Any = 0,
        owner: Any = 0,
        *,
        owners: Any = 1,
        group: int = 0,
        fence: Fence | None = None,
    ) -> None:
        pages = self._arrays.pages(pages)
        held = owners if isinstance(owners, int) else torch.as_tensor(owners, device=self.device).to(torch.int32)
        self._table.adopt(pages, self._identity(identity), self._owner(owner), held)
        self._leave("adopt", pages, fence)

    def release(self, pages: Any, owner: Any = 0) -> None:
        self._table.release(self._arrays.pages(pages), self._owner(owner))

    def free(self, pages: Any, *, fence: Fence | None = None) -> None:
        pages = self._arrays.pages(pages)
        self._table.free(pages)
        self._leave("free", pages, fence)

    def move(self, sources: Any, targets: Any, owner: Any = 0, *, fence: Fence | None = None) -> None:
        sources, targets = self._arrays.pages(sources), self._arrays.pages(targets)
        self._table.move(sources, targets, self._owner(owner))
        (targets, generations), (sources, source_generations) = self._table.moved(targets, sources)
        self._work.append(
            _DeviceWork(
                kind="move",
                pages=targets,
                generations=generations,
                fence=fence,
                sources=sources,
                source_generations=source_generations,
                written=self._here(),
            )
        )

    def hold(self, pages: Any, identity: Any = 0) -> None:
        """The engine's prefix cache says that it holds these pages: a look at its tables, no change."""
        self._table.hold(self._arrays.pages(pages), self._identity(identity))

    def identities(self, pages: torch.Tensor) -> torch.Tensor:
        """What the pages hold as far as events went, int64 on the device, 0 where it is not known."""
        identities: torch.Tensor = self._table.identity[pages]
        return identities

    def load(self, pages: Any, owner: Any = 0) -> None:
        self._table.load(self._arrays.pages(pages), self._owner(owner))

    def export(self, pages: Any, *, fence: Fence | None = None) -> Manifest:
        pages, table = self._arrays.pages(pages), self._table
        there = (pages >= 0) & (pages < self.pages)
        index = torch.where(there, pages, 0)
        state = table.state[index]
        complete = there & ((state == SEALED) | (state == FREE))
        manifest = Manifest(len(pages))
        manifest.identify(torch.where(complete, table.identity[index], 0))
        self._work.append(
            _DeviceWork(
                kind="export",
                pages=index,
                generations=torch.where(complete, table.generation[index], -1),
                fence=fence,
                manifest=manifest,
                identities=manifest.identities,
                written=self._here(),
            )
        )
        return manifest

    def admit(self, pages: Any, manifest: Manifest, identity: Any = 0, *, fence: Fence | None = None) -> None:
        pages = self._arrays.pages(pages)
        told = None if isinstance(identity, int) and not identity else self._identity(identity)
        self._table.seal(pages, self._carried(manifest, len(pages)) if told is None else told)
        ((pages, generations),) = self._table.left(pages)
        self._work.append(
            _DeviceWork(
                kind="admit",
                pages=pages,
                generations=generations,
                fence=fence,
                manifest=manifest,
                identities=told.clone() if isinstance(told, torch.Tensor) else told,
                written=self._here(),
            )
        )

    def _carried(self, manifest: Manifest, count: int) -> Any:
        """What the manifest's pages held, as far as that is known here without waiting."""
        identities = manifest.identities
        if identities is None or len(identities) != count:
            return 0
        if isinstance(identities, torch.Tensor) and identities.device != self.device:
            return 0
        return self._identity(identities)

    def forget(self, pages: Any) -> None:
        self._table.forget(self._arrays.pages(pages))

    def reset(self) -> None:
        table = self._table
        for column in table.columns:
            if column is not table.generation:
                column.zero_()
        table.generation += 1  # last: who reads a raised one finds no state from before
        self._work.clear()

    def _leave(self, kind: Any, pages: Any, fence: Fence | None) -> None:
        ((pages, generations),) = self._table.left(pages)
        self._work.append(
            _DeviceWork(kind=kind, pages=pages, generations=generations, fence=fence, written=self._here())
        )

    def _here(self) -> torch.cuda.Event | None:
        """The point that the engine's stream has been given work up to."""
        if self._stream is None:
            return None
        make_event: Any = torch.cuda.Event
        event: torch.cuda.Event = make_event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _owner(self, owner: Any) -> Any:
        if isinstance(owner, (str, int)):
            return self._names.handle(owner)
        return torch.as_tensor(owner, device=self.device).to(torch.int64)

    def _identity(self, identity: Any) -> Any:
        return identity if isinstance(identity, int) else torch.as_tensor(identity, device=self.device).to(torch.int64)

    def _flag(self, reason: Reason, pages: Any, mask: Any, owner: Any) -> None:
        owners = owner if isinstance(owner, torch.Tensor) else torch.full_like(pages, owner)
        # a page may occur twice in `pages`, once in the wrong: only wrong ones are written
        wrong = torch.where(mask, pages, self.pages)
        self._reason[wrong] = int(reason)
        self._culprit[wrong] = owners
        self._violations.index_add_(0, pages, mask.to(torch.int32))

    # Canary thread

    def catch_up(self, *, seconds: float) -> bool:
        return True

    def take_work(self) -> Work | None:
        work = self._next = self._next or self._work.take()
        if work is None or not _is_there(work):
            return None
        self._next = None
        with self._looking():
            pages, sources = _host(work.pages), _host(work.sources)
            generations, source_generations = _host(work.generations), _host(work.source_generations)
            identities = _host(work.identities) if isinstance(work.identities, torch.Tensor) else work.identities
        if len(pages):
            numbers = pages if sources is None else np.stack([pages, sources])
            there = (numbers >= 0) & (numbers < self.pages) & (numbers != self._padding)
            known = there.reshape(-1, len(pages)).all(axis=0)
            if work.manifest is not None:  # its rows stay in their places
                pages, generations = np.where(known, pages, 0), np.where(known, generations, -1)
            elif not known.all():  # padding of an engine's page table: no page, so nothing to do
                pages, generations = pages[known], generations[known]
                if sources is not None:
                    sources, source_generations = sources[known], source_generations[known]
        return Work(
            kind=work.kind,
            pages=pages,
            generations=generations,
            fence=work.fence,
            sources=sources,
            source_generations=source_generations,
            manifest=work.manifest,
            identities=identities,
        )

    def take_violations(self) -> list[Violation]:
        with self._looking():
            counts = _host(self._violations).copy()
            pages = np.flatnonzero(counts != self._seen)
            self._seen = counts
            pages = pages[pages != self._padding]
            table = self._table
            return [
                Violation(
                    reason=Reason(int(self._reason[page])),
                    page=int(page),
                    owner=int(self._culprit[page]),
                    previous_owner=int(table.previous_owner[page]),
                    owners=int(table.owners[page]),
                    state=int(table.state[page]),
                    generation=int(table.generation[page]),
                    step=table.step,
                )
                for page in pages
            ]

    def generations(self, pages: PageArray) -> PageArray:
        with self._looking():
            there = torch.from_numpy(np.ascontiguousarray(pages)).to(self.device)
            generations: PageArray = _host(self._table.generation[there])
        return generations

    def applied_generations(self, start: int, stop: int) -> PageArray:
        return self.generations_between(start, stop)  # a kernel writes the state before it raises the generation

    def generations_between(self, start: int, stop: int) -> PageArray:
        with self._looking():
            generations: PageArray = _host(self._table.generation[start:stop])
        return generations

    def group_of(self, pages: PageArray) -> npt.NDArray[np.uint8] | None:
        return None  # one group a space

    @property
    def columns(self) -> PageColumns:
        return PageColumns(state=self._table.state, generation=self._table.generation)

    def states(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        with self._looking():
            states: npt.NDArray[np.uint8] = _host(self._table.state[start:stop])
        return states

    def row(self, page: int) -> LedgerRow:
        with self._looking():
            return super().row(page)

    @property
    def claims_not_covered(self) -> int:
        with self._looking():
            return super().claims_not_covered

    @property
    def live_generations(self) -> PageArray:
        """The generations as a host array; shares the ledger's memory when it lives on the CPU. Read only."""
        with self._looking():
            return _host(self._table.generation)  # type: ignore[no-any-return]

    def _looking(self) -> AbstractContextManager[object]:
        return on_stream(self._stream)

    @property
    def nbytes(self) -> int:
        columns = (*self._table.columns, self._violations, self._reason, self._culprit)
        return sum(int(column.nbytes) for column in columns) + self._seen.nbytes

    @property
    def overrun(self) -> bool:
        return False


def _host(values: Any) -> Any:
    return None if values is None else values.cpu().numpy()


def _is_there(work: Work) -> bool:
    written: Any = work.written if isinstance(work, _DeviceWork) else None
    return written is None or bool(written.query())
