"""The page state machine: columns with one entry a page, and one method an event.

Runs on one thread, the *applier*: the canary thread for a `HostLedger` (which replays the engine's events in order),
the engine's thread for a `TensorLedger` (in stream order). It is written with operations that index numpy arrays and
torch tensors alike and never look at a value on the host, so that nothing waits for a device. What contradicts the
columns goes to `flag(reason, pages, mask, owner)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kv_canary.ledger.arrays import Arrays
from kv_canary.ledger.states import FREE, LOADING, OPEN, SEALED, UNKNOWN, Reason

Flag = Callable[[Reason, Any, Any, Any], None]
Left = tuple[Any, Any]
"""Pages and their generations, which nobody changes any more."""


class PageTable:
    """Columns, each of shape [pages]: see `__init__` for what they hold. Written by the applier alone."""

    def __init__(self, pages: int, arrays: Arrays, flag: Flag) -> None:
        self.arrays = arrays
        self._flag = flag
        self.state = arrays.zeros(pages, "uint8")  # UNKNOWN .. LOADING
        self.generation = arrays.zeros(pages, "int64")  # raised whenever the page may be written anew
        self.owners = arrays.zeros(pages, "int32")  # how many hold it
        self.owner = arrays.zeros(pages, "int64")  # handle of one that holds it, 0 is not known or nobody
        self.previous_owner = arrays.zeros(pages, "int64")
        self.identity = arrays.zeros(pages, "int64")  # of the tokens it was sealed with, 0 is not known
        self.claim_identity = arrays.zeros(pages, "int64")  # claimed while open: judged when it is sealed
        self.written_step = arrays.zeros(pages, "int32")
        self.changed_step = arrays.zeros(pages, "int32")  # of the last change of state
        self._marks = arrays.zeros(pages, "int32")
        self._travels: Any = None  # of the last move
        self.step = 1
        self.claims_not_covered = arrays.zeros(1, "int64")

    @property
    def columns(self) -> tuple[Any, ...]:
        return (
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
        )

    def allocate(self, pages: Any, owner: Any) -> None:
        self.generation[pages] += 1
        self._give_up_claims(pages, owner)
        self.arrays.add_at(self.owners, pages, 1)
        self._flag(Reason.TWO_OWNERS, pages, self.owners[pages] > 1, owner)
        held = self.owner[pages]
        self.previous_owner[pages] = self.arrays.where(held != 0, held, self.previous_owner[pages])
        self.owner[pages] = owner
        self.identity[pages] = 0
        self._enter(pages, OPEN)

    def write(self, pages: Any, owner: Any) -> None:
        self._judge_write(pages, owner)
        self.written_step[pages] = self.step

    def seal(self, pages: Any, identity: Any) -> None:
        free = self.state[pages] == FREE
        self._flag(Reason.SEAL_OF_FREE, pages, free, 0)
        self._judge_claims(pages, identity, ~free)
        self.identity[pages] = identity
        self.state[pages] = self.arrays.where(free, self.state[pages], self._constant(SEALED))
        self.changed_step[pages] = self.step

    def claim(self, pages: Any, identity: Any, owner: Any) -> None:
        state, known = self.state[pages], self.identity[pages]
        opened = state == OPEN
        pending = opened & ((self.written_step[pages] == self.step) | (self.changed_step[pages] == self.step))
        self._flag(Reason.CLAIM_OF_OPEN, pages, opened & ~pending, owner)
        self._flag(Reason.CLAIM_OF_FREE, pages, state == FREE, owner)
        self._flag(Reason.CLAIM_OF_LOADING, pages, state == LOADING, owner)
        differs = (state == SEALED) & (known != 0) & (identity != 0) & (known != identity)
        self._flag(Reason.CLAIM_IDENTITY, pages, differs, owner)
        claimed = self.claim_identity[pages]
        clash = pending & (claimed != 0) & (identity != 0) & (claimed != identity)
        self._flag(Reason.CLAIM_IDENTITY, pages, clash, owner)  # one of the two is wrong, whatever it is sealed with
        judged = pending & (claimed == 0)
        self.claim_identity[pages] = self.arrays.where(judged, identity + 0 * known, claimed)
        self.claims_not_covered += ((state == UNKNOWN) | ((state == SEALED) & ((known == 0) | (identity == 0)))).sum()
        unowned = self.owners[pages] == 0
        self.owner[pages] = self.arrays.where(unowned, owner + 0 * known, self.owner[pages])
        self.arrays.add_at(self.owners, pages, 1)

    def reopen(self, pages: Any) -> None:
        self.generation[pages] += 1
        self._flag(Reason.WRITE_TO_FREE, pages, self.state[pages] == FREE, 0)
        self.identity[pages] = 0
        self._enter(pages, OPEN)

    def load(self, pages: Any, owner: Any) -> None:
        self.generation[pages] += 1
        self._judge_write(pages, owner)
        self.identity[pages] = 0
        self._enter(pages, LOADING)

    def adopt(self, pages: Any, identity: Any, owner: Any, owners: Any) -> None:
        self.identity[pages] = identity
        self.claim_identity[pages] = 0
        self.owner[pages] = owner
        self.owners[pages] = owners
        self._enter(pages, SEALED)

    def release(self, pages: Any, owner: Any) -> None:
        self.arrays.add_at(self.owners, pages, -1)
        left = self.owners[pages]
        self.owners[pages] = self.arrays.where(left < 0, 0 * left, left)
        # nobody knows who held a page that nothing is known of
        self._flag(Reason.RELEASE_WITHOUT_OWNER, pages, (left < 0) & (self.state[pages] != UNKNOWN), owner)
        # the one we know by name may leave while others stay: then we know of none by name
        self._disown(pages, (left <= 0) | (self.owner[pages] == owner))

    def free(self, pages: Any) -> None:
        self._marks[pages] = 0
        self.arrays.add_at(self._marks, pages, 1)
        twice = (self.state[pages] == FREE) | (self._marks[pages] > 1)
        self._flag(Reason.FREE_TWICE, pages, twice, 0)
        self._flag(Reason.FREE_WHILE_OWNED, pages, self.owners[pages] > 0, self.owner[pages])
        self._give_up_claims(pages, 0)
        self.owners[pages] = 0
        self._disown(pages, self.owners[pages] == 0)
        self._enter(pages, FREE)

    def move(self, sources: Any, targets: Any, owner: Any) -> None:
        state, held = self.state[targets], self.owner[targets]
        used = (state == SEALED) | (state == FREE) | ((held != 0) & (owner != 0) & (held != owner))
        self._flag(Reason.MOVE_ONTO_USED, targets, used, owner)
        travels = self._travels = self.state[sources] == SEALED
        self._judge_claims(targets, self.identity[sources], travels)
        self.identity[targets] = self.arrays.where(travels, self.identity[sources], self.identity[targets])
        self.state[targets] = self.arrays.where(travels, self._constant(SEALED), state)
        self.changed_step[targets] = self.step

    def hold(self, pages: Any, identity: Any) -> None:
        state, known = self.state[pages], self.identity[pages]
        self._flag(Reason.HELD_BUT_FREE, pages, state == FREE, 0)
        self._flag(Reason.HELD_BUT_OPEN, pages, state == OPEN, self.owner[pages])
        differs = (state == SEALED) & (known != 0) & (identity != 0) & (known != identity)
        self._flag(Reason.HELD_IDENTITY, pages, differs, self.owner[pages])

    def forget(self, pages: Any) -> None:
        self.generation[pages] += 1
        self.owners[pages] = 0
        self.owner[pages] = 0
        self.identity[pages] = 0
        self.claim_identity[pages] = 0
        self._enter(pages, UNKNOWN)

    def left(self, *columns: Any) -> list[Left]:
        """For each column of pages of the event applied last, what its work is about."""
        return [(pages, self.generation[pages]) for pages in columns]

    def moved(self, targets: Any, sources: Any) -> list[Left]:
        """The same of a move: targets, then sources; one that was not sealed has nothing to hand on, and no generation.

        When the work is done it may be sealed, as another page: its reader went on to write the copy.
        """
        (targets, reached), (sources, held) = self.left(targets, sources)
        return [(targets, reached), (sources, self.arrays.where(self._travels, held, 0 * held - 1))]

    def _judge_write(self, pages: Any, owner: Any) -> None:
        state, held = self.state[pages], self.owner[pages]
        self._flag(Reason.WRITE_TO_SEALED, pages, state == SEALED, owner)
        self._flag(Reason.WRITE_TO_FREE, pages, state == FREE, owner)
        opened = state == OPEN
        foreign = opened & (held != 0) & (held != owner) & (owner != 0)
        self._flag(Reason.WRITE_TO_FOREIGN, pages, foreign, owner)
        # an allocator that does not know for whom leaves the name to the first who writes
        self.owner[pages] = self.arrays.where(opened & (held == 0), owner + 0 * held, held)

    def _enter(self, pages: Any, state: int) -> None:
        self.state[pages] = state
        self.changed_step[pages] = self.step

    def _disown(self, pages: Any, mask: Any) -> None:
        held = self.owner[pages]
        gone = mask & (held != 0)
        self.previous_owner[pages] = self.arrays.where(gone, held, self.previous_owner[pages])
        self.owner[pages] = self.arrays.where(mask, 0 * held, held)

    def _judge_claims(self, pages: Any, identity: Any, sealed: Any) -> None:
        claimed = self.claim_identity[pages]
        differs = sealed & (claimed != 0) & (identity != 0) & (claimed != identity)
        self._flag(Reason.CLAIM_IDENTITY, pages, differs, self.owner[pages])
        self.claim_identity[pages] = self.arrays.where(sealed, 0 * claimed, claimed)

    def _give_up_claims(self, pages: Any, owner: Any) -> None:
        self._flag(Reason.CLAIMED_NEVER_SEALED, pages, self.claim_identity[pages] != 0, owner)
        self.claim_identity[pages] = 0

    def _constant(self, state: int) -> Any:
        # of the column's own type: where() would widen a plain int
        constant = self.state[:1] * 0
        constant += state
        return constant
