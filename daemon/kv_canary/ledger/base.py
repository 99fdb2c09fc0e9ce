"""What the canary thread needs of a ledger, and what both kinds of ledger share."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kv_canary.ledger.columns import PageColumns
from kv_canary.ledger.manifest import Manifest
from kv_canary.ledger.states import Violation
from kv_canary.ledger.work import Fence, Work

PageArray = npt.NDArray[np.int64]
Owner = str | int

_OWNER_NAMES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """What the ledger knows of one page."""

    page: int
    state: int
    generation: int
    owner: str | None
    previous_owner: str | None
    owners: int
    identity: int
    changed_step: int


class OwnerNames:
    """Handles for owners' names: small integers that fit a column, 0 for nobody. The name used longest ago goes first.

    `handle` is called by the applier alone; `name` by anyone (a name that is gone reads as `request#HANDLE`).
    """

    def __init__(self, capacity: int = _OWNER_NAMES) -> None:
        self._handles: OrderedDict[str, int] = OrderedDict()
        self._names: dict[int, str] = {}
        self._capacity = capacity
        self._next = 1

    def handle(self, owner: Owner) -> int:
        if isinstance(owner, (int, np.integer)):
            return int(owner)
        if not owner:
            return 0
        handle = self._handles.get(owner)
        if handle is None:
            handle, self._next = self._next, self._next + 1
            self._handles[owner] = handle
            self._names[handle] = owner
            if len(self._handles) > self._capacity:
                self._names.pop(self._handles.popitem(last=False)[1])
        else:
            # a request that lives long keeps its handle: with a new one it would look like a stranger
            self._handles.move_to_end(owner)
        return handle

    def name(self, handle: int) -> str | None:
        return self._names.get(handle, f"request#{handle}") if handle else None


class Ledger(Protocol):
    """One page-number space. The events (`allocate` ... `reset`) are the engine thread's, the rest is the canary
    thread's.

    Events take whole batches, never raise for what the engine does wrong (that becomes a `Violation`), never wait and
    never touch a page. `pages` are copied. An owner is a request's name, a handle, or an array of handles, one a page.
    """

    name: str
    pages: int

    def step(self, number: int | None = None) -> None:
        """The engine begins another step: the one of that number, or the next one."""

    def allocate(self, pages: Any, owner: Any = 0, *, group: int = 0) -> None: ...

    def write(self, pages: Any, owner: Any = 0) -> None: ...

    def seal(self, pages: Any, identity: Any = 0, *, fence: Fence | None = None) -> None: ...

    def claim(self, pages: Any, identity: Any = 0, owner: Any = 0) -> None: ...

    def reopen(self, pages: Any) -> None: ...

    def adopt(
        self,
        pages: Any,
        identity: Any = 0,
        owner: Any = 0,
        *,
        owners: Any = 1,
        group: int = 0,
        fence: Fence | None = None,
    ) -> None: ...

    def release(self, pages: Any, owner: Any = 0) -> None: ...

    def free(self, pages: Any, *, fence: Fence | None = None) -> None: ...

    def move(self, sources: Any, targets: Any, owner: Any = 0, *, fence: Fence | None = None) -> None: ...

    def load(self, pages: Any, owner: Any = 0) -> None:
        """A copy from a tier or a peer into the pages, which their owner has allocated, is about to be launched."""

    def export(self, pages: Any, *, fence: Fence | None = None) -> Manifest:
        """Complete pages are about to be copied to a tier or a peer; what they hold now is written into the manifest.

        A free page is complete as well: it is copied before it is given away again. `fence`: not before it is there.
        """

    def admit(self, pages: Any, manifest: Manifest, identity: Any = 0, *, fence: Fence | None = None) -> None:
        """Pages are complete once the copy of the pages of `manifest` into them has run: sealed, and held against it.

        `identity` is what the engine takes them for; without one it is the manifest's.
        """

    def forget(self, pages: Any) -> None:
        """The pages leave this space (their memory is lent to another pool): nothing is known of them any more."""

    def reset(self) -> None:
        """Nothing is known of any page; `adopt`, `allocate` and `free` follow from the engine's own tables."""

    def catch_up(self, *, seconds: float) -> bool:
        """Applies pending events for about `seconds`; true when none is left."""

    def take_work(self) -> Work | None: ...

    def take_violations(self) -> list[Violation]: ...

    def generations(self, pages: PageArray) -> PageArray:
        """The generations as the engine's thread last raised them."""

    def applied_generations(self, start: int, stop: int) -> PageArray:
        """Generations of the pages `start` .. `stop - 1` as far as events are applied; to be read before `states`."""

    def generations_between(self, start: int, stop: int) -> PageArray:
        """The same for the pages `start` .. `stop - 1`; read only."""

    @property
    def live_generations(self) -> PageArray:
        """The generations of all pages as a host array, for an exchange of a byte under the GIL. Read only."""

    def group_of(self, pages: PageArray) -> npt.NDArray[np.uint8] | None:
        """The group (its place among those of the space) that each page is shaped for as far as events are applied;
        None where the space has one group only.
        """

    @property
    def columns(self) -> PageColumns | None:
        """The columns by which a device can pick pages itself; None where the live generations are the host's."""

    def states(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """States of the pages `start` .. `stop - 1` as far as events are applied."""

    def row(self, page: int) -> LedgerRow: ...

    def owner_name(self, handle: int) -> str | None: ...

    @property
    def engine_step(self) -> int: ...

    @property
    def claims(self) -> int: ...

    @property
    def claims_not_covered(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def overrun(self) -> bool:
        """True once events were lost because nobody applied them; `reset` clears it."""


class WorkQueue:
    """Work in event order; the applier appends, the canary thread takes. `deque` makes both ends atomic."""

    def __init__(self) -> None:
        self._work: deque[Work] = deque()
        self.claims = 0

    def append(self, work: Work) -> None:
        if work.kind == "claim":
            self.claims += len(work.pages)
        self._work.append(work)

    def take(self) -> Work | None:
        try:
            return self._work.popleft()
        except IndexError:
            return None

    def clear(self) -> None:
        while (work := self.take()) is not None:
            abandon(work)

    def __len__(self) -> int:
        return len(self._work)


def abandon(work: Work) -> None:
    """Work that nobody will do: who waits for its manifest waits no longer."""
    if work.kind == "export" and work.manifest is not None:
        work.manifest.abandon()
