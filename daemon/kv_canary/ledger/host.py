"""The ledger of an engine whose page numbers are host integers: events are recorded on its thread and replayed on ours.

Who writes what. The engine's thread writes `_live` (the generations) and appends to `_events`; the canary thread
replays the events into the `PageTable` and writes all else. The engine's thread does two things a call, both O(pages
touched): it raises the live generations where the event says that the pages may be written anew, and it appends one
tuple.

Why that is enough. The engine raises a live generation before it launches the write, on the same thread, so whoever has
read a byte of that write finds the raised generation when it looks afterwards (it looks while it holds the GIL, which
orders it after the engine's store). The replayed table may be behind: then its generation differs from the live one and
the page is left alone until the replay has caught up. Nothing but the generation is needed for that, so nothing else is
in a hurry.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_canary.ledger.arrays import HostArrays
from kv_canary.ledger.base import OwnerNames, PageArray, WorkQueue
from kv_canary.ledger.manifest import Manifest
from kv_canary.ledger.reading import TableReader
from kv_canary.ledger.short import HostPageTable
from kv_canary.ledger.states import FREE, SEALED, Reason, Violation
from kv_canary.ledger.work import Fence, Work

MAXIMUM_PENDING_EVENTS = 200_000

(
    _STEP,
    _ALLOCATE,
    _WRITE,
    _SEAL,
    _CLAIM,
    _REOPEN,
    _ADOPT,
    _RELEASE,
    _FREE,
    _MOVE,
    _FORGET,
    _RESET,
    _LOAD,
    _EXPORT,
    _ADMIT,
) = range(15)
_LISTED = {_ALLOCATE, _WRITE, _SEAL, _CLAIM, _REOPEN, _RELEASE, _FREE, _FORGET, _LOAD}
SHORT_LIST = 256  # page numbers: a longer list is dearer to keep than to convert


class HostLedger(TableReader):
    """`Ledger` for host page numbers."""

    def __init__(
        self, name: str, pages: int, *, groups: int = 1, maximum_pending_events: int = MAXIMUM_PENDING_EVENTS
    ) -> None:
        """`groups` is how many groups lay their pages over the same bytes (see `group_of`)."""
        self.name = name
        self.pages = pages
        self._arrays = HostArrays()
        self._live: PageArray = np.zeros(pages, np.int64)
        items: Any = self._live
        self._live_items = memoryview(items)  # the same memory, whose items are plain integers
        self._events: deque[tuple[Any, ...]] = deque()
        self._maximum = maximum_pending_events
        self._overrun = False
        self._steps = 1
        self._table = HostPageTable(pages, self._arrays, self._flag, self._flag_page)
        self._names = OwnerNames()
        self._work = WorkQueue()
        self._violations: list[Violation] = []
        self._group = np.zeros(pages, np.uint8) if groups > 1 else None

    # Engine's thread

    def _record(self, *event: Any) -> bool:
        if self._overrun or len(self._events) >= self._maximum:
            # Nobody replays: hold no more memory. The live generations still protect every page; what is replayed ends
            # here until a reset, so that no event is judged without the ones before it.
            self._overrun = True
            return False
        self._events.append(event)
        return True

    def _raise(self, pages: list[int] | PageArray) -> None:
        if isinstance(pages, list):
            items = self._live_items
            for page in set(pages):  # an event raises a generation once
                items[page] += 1
        else:
            self._live[pages] += 1

    def step(self, number: int | None = None) -> None:
        self._steps = self._steps + 1 if number is None else number
        self._record(_STEP, self._steps)

    def allocate(self, pages: Any, owner: Any = 0, *, group: int = 0) -> None:
        pages = _numbers(pages)
        self._raise(pages)
        self._record(_ALLOCATE, pages, _kept(owner), group)

    def write(self, pages: Any, owner: Any = 0) -> None:
        self._record(_WRITE, _numbers(pages), _kept(owner))

    def seal(self, pages: Any, identity: Any = 0, *, fence: Fence | None = None) -> None:
        self._record(_SEAL, _numbers(pages), _numbers(identity), fence)

    def claim(self, pages: Any, identity: Any = 0, owner: Any = 0) -> None:
        self._record(_CLAIM, _numbers(pages), _numbers(identity), _kept(owner))

    def reopen(self, pages: Any) -> None:
        pages = _numbers(pages)
        self._raise(pages)
        self._record(_REOPEN, pages)

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
        self._record(
            _ADOPT,
            np.array(pages, np.int64),
            np.array(identity, np.int64),
            _kept(owner),
            np.array(owners),
            fence,
            group,
        )

    def release(self, pages: Any, owner: Any = 0) -> None:
        self._record(_RELEASE, _numbers(pages), _kept(owner))

    def free(self, pages: Any, *, fence: Fence | None = None) -> None:
        self._record(_FREE, _numbers(pages), fence)

    def move(self, sources: Any, targets: Any, owner: Any = 0, *, fence: Fence | None = None) -> None:
        self._record(_MOVE, np.array(sources, np.int64), np.array(targets, np.int64), _kept(owner), fence)

    def load(self, pages: Any, owner: Any = 0) -> None:
        pages = _numbers(pages)
        self._raise(pages)
        self._record(_LOAD, pages, _kept(owner))

    def export(self, pages: Any, *, fence: Fence | None = None) -> Manifest:
        pages = np.array(pages, np.int64)
        manifest = Manifest(len(pages))
        if not self._record(_EXPORT, pages, manifest, fence):
            manifest.abandon()
        return manifest

    def admit(self, pages: Any, manifest: Manifest, identity: Any = 0, *, fence: Fence | None = None) -> None:
        told = None if isinstance(identity, int) and not identity else np.array(identity, np.int64)
        self._record(_ADMIT, np.array(pages, np.int64), manifest, told, fence)

    def forget(self, pages: Any) -> None:
        pages = _numbers(pages)
        self._raise(pages)
        self._record(_FORGET, pages)

    def reset(self) -> None:
        self._live += 1
        # what was not replayed goes with the event that says so: somebody may wait for a manifest in there
        dropped, self._events = self._events, deque()
        self._overrun = False
        self._record(_RESET, self._live.copy(), self._steps, dropped)

    # Canary thread

    def catch_up(self, *, seconds: float) -> bool:
        until = perf_counter() + seconds
        while True:
            try:
                event = self._events.popleft()
            except IndexError:
                return True
            self._replay(event)
            if perf_counter() >= until:
                return not self._events

    def _replay(self, event: tuple[Any, ...]) -> None:
        table, kind = self._table, event[0]
        if kind in _LISTED:  # kept as it was given, to be quick on the engine's thread
            event = (kind, np.array(event[1], np.int64), *event[2:])
        if kind == _STEP:
            table.step = event[1]
        elif kind == _RESET:
            self._replay_reset(event[1], event[2])
            _abandon(event[3])
        elif kind == _MOVE:
            _, sources, targets, owner, fence = event
            table.move(sources, targets, self._owner(owner))
            (targets, generations), (sources, source_generations) = table.moved(targets, sources)
            self._work.append(
                Work(
                    kind="move",
                    pages=targets,
                    generations=generations,
                    fence=fence,
                    sources=sources,
                    source_generations=source_generations,
                )
            )
        elif kind == _ALLOCATE:
            self._shape(event[1], event[3])
            table.allocate(event[1], self._owner(event[2]))
        elif kind == _WRITE:
            table.write(event[1], self._owner(event[2]))
        elif kind == _SEAL:
            table.seal(event[1], np.array(event[2], np.int64))
            self._leave("seal", event[1], event[3])
        elif kind == _CLAIM:
            table.claim(event[1], np.array(event[2], np.int64), self._owner(event[3]))
            self._leave("claim", event[1], None)
        elif kind == _REOPEN:
            table.reopen(event[1])
        elif kind == _ADOPT:
            self._shape(event[1], event[6])
            table.adopt(event[1], event[2], self._owner(event[3]), event[4])
            self._leave("adopt", event[1], event[5])
        elif kind == _RELEASE:
            table.release(event[1], self._owner(event[2]))
        elif kind == _FREE:
            table.free(event[1])
            self._leave("free", event[1], event[2])
        elif kind == _FORGET:
            table.forget(event[1])
        elif kind == _LOAD:
            table.load(event[1], self._owner(event[2]))
        elif kind == _EXPORT:
            self._replay_export(event[1], event[2], event[3])
        elif kind == _ADMIT:
            self._replay_admit(event[1], event[2], event[3], event[4])

    def _replay_export(self, pages: PageArray, manifest: Manifest, fence: Fence | None) -> None:
        table, state = self._table, self._table.state[pages]
        complete = (state == SEALED) | (state == FREE)
        identities = np.where(complete, table.identity[pages], 0)
        manifest.identify(identities)
        self._work.append(
            Work(
                kind="export",
                pages=pages,
                generations=np.where(complete, table.generation[pages], -1),
                fence=fence,
                manifest=manifest,
                identities=identities,
            )
        )

    def _replay_admit(self, pages: PageArray, manifest: Manifest, told: Any, fence: Fence | None) -> None:
        if told is not None and told.size not in (1, len(pages)):
            told = None
        identities = manifest.identities if told is None else told
        if not isinstance(identities, np.ndarray) or identities.size not in (1, len(pages)):
            identities = np.zeros(1, np.int64)  # it left another ledger a moment ago, or there is nothing to know
        self._table.seal(pages, np.broadcast_to(identities, pages.shape))
        self._work.append(
            Work(
                kind="admit",
                pages=pages,
                generations=self._table.generation[pages],
                fence=fence,
                manifest=manifest,
                identities=told,
            )
        )

    def _replay_reset(self, generations: PageArray, step: int) -> None:
        for column in self._table.columns:
            column[:] = 0
        if self._group is not None:
            self._group[:] = 0
        self._table.generation[:] = generations
        self._table.step = step  # steps that were dropped count too
        self._work.clear()
        self._violations.clear()

    def _leave(self, kind: Any, pages: PageArray, fence: Fence | None) -> None:
        self._work.append(Work(kind=kind, pages=pages, generations=self._table.generation[pages], fence=fence))

    def _shape(self, pages: PageArray, group: int) -> None:
        if self._group is not None:
            self._group[pages] = group

    def _owner(self, owner: Any) -> Any:
        if isinstance(owner, (str, int)):
            return self._names.handle(owner)
        return np.array([self._names.handle(one) for one in owner], np.int64)

    def _flag(self, reason: Reason, pages: Any, mask: Any, owner: Any) -> None:
        if not mask.any():
            return
        owners = np.broadcast_to(owner, pages.shape)
        for index in np.flatnonzero(mask):
            self._flag_page(reason, int(pages[index]), int(owners[index]))

    def _flag_page(self, reason: Reason, page: int, owner: int) -> None:
        table = self._table
        self._violations.append(
            Violation(
                reason=reason,
                page=page,
                owner=owner,
                previous_owner=int(table.owner[page]) or int(table.previous_owner[page]),
                owners=int(table.owners[page]),
                state=int(table.state[page]),
                generation=int(table.generation[page]),
                step=table.step,
            )
        )

    def take_work(self) -> Work | None:
        return self._work.take()

    def take_violations(self) -> list[Violation]:
        taken, self._violations = self._violations, []
        return taken

    def generations(self, pages: PageArray) -> PageArray:
        return self._live[pages]

    def applied_generations(self, start: int, stop: int) -> PageArray:
        generations: PageArray = self._table.generation[start:stop]
        return generations

    def generations_between(self, start: int, stop: int) -> PageArray:
        return self._live[start:stop]

    def group_of(self, pages: PageArray) -> npt.NDArray[np.uint8] | None:
        return None if self._group is None else self._group[pages]

    @property
    def columns(self) -> None:
        return None

    def states(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        states: npt.NDArray[np.uint8] = self._table.state[start:stop]
        return states

    @property
    def live_generations(self) -> PageArray:
        """The live column itself, for an exchange of a byte under the GIL. Read only."""
        return self._live

    @property
    def nbytes(self) -> int:
        group = 0 if self._group is None else self._group.nbytes
        return int(self._live.nbytes + group + sum(column.nbytes for column in self._table.columns))

    @property
    def overrun(self) -> bool:
        return self._overrun


def _numbers(values: Any) -> Any:
    """Page numbers or identities as they are now: a list stays one, anything else becomes an array of ours."""
    if isinstance(values, list) and len(values) <= SHORT_LIST:
        return list(values)
    return values if isinstance(values, int) else np.array(values, np.int64)


def _abandon(events: deque[tuple[Any, ...]]) -> None:
    for event in events:
        if event[0] == _EXPORT:
            event[2].abandon()
        elif event[0] == _RESET:
            _abandon(event[3])


def _kept(owner: Any) -> Any:
    """`owner` as it is now: a batch of owners may be a table that the engine goes on to change."""
    return owner if isinstance(owner, (str, int)) else list(owner)
