"""Words of the protocol: page states, and the reasons for which an event is a mismatch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kv_canary.snapshot import PAGE_STATES, Check

UNKNOWN, OPEN, SEALED, FREE, LOADING = range(5)
assert PAGE_STATES == ("unknown", "open", "sealed", "free", "loading")


class Reason(IntEnum):
    """Why an event contradicts what the ledger knows. The values are stored in device memory: do not renumber."""

    TWO_OWNERS = 1
    WRITE_TO_SEALED = 2
    WRITE_TO_FREE = 3
    WRITE_TO_FOREIGN = 4
    SEAL_OF_FREE = 5
    CLAIM_OF_OPEN = 6
    CLAIM_OF_FREE = 7
    CLAIM_OF_LOADING = 8
    CLAIM_IDENTITY = 9
    CLAIMED_NEVER_SEALED = 10
    RELEASE_WITHOUT_OWNER = 11
    FREE_TWICE = 12
    FREE_WHILE_OWNED = 13
    MOVE_ONTO_USED = 14
    HELD_BUT_FREE = 15
    HELD_BUT_OPEN = 16
    HELD_IDENTITY = 17

    @property
    def check(self) -> Check:
        return _MEANING[self][0]

    @property
    def text(self) -> str:
        return _MEANING[self][1]


_MEANING: dict[Reason, tuple[Check, str]] = {
    Reason.TWO_OWNERS: ("ownership", "allocated while it still had an owner"),
    Reason.WRITE_TO_SEALED: ("ownership", "a step was about to write it although it was sealed"),
    Reason.WRITE_TO_FREE: ("ownership", "a step was about to write it although it was free"),
    Reason.WRITE_TO_FOREIGN: ("ownership", "a step of another request was about to write it"),
    Reason.SEAL_OF_FREE: ("ownership", "sealed although it was free"),
    Reason.CLAIM_OF_OPEN: ("identity", "a prefix hit pointed at it although it was not sealed"),
    Reason.CLAIM_OF_FREE: ("identity", "a prefix hit pointed at it although it was free"),
    Reason.CLAIM_OF_LOADING: ("transfer", "a prefix hit pointed at it while it was still being loaded"),
    Reason.CLAIM_IDENTITY: ("identity", "a prefix hit pointed at it, but it holds other tokens"),
    Reason.CLAIMED_NEVER_SEALED: ("identity", "a prefix hit pointed at it, and it was given up before it was sealed"),
    Reason.RELEASE_WITHOUT_OWNER: ("ownership", "released although it had no owner"),
    Reason.FREE_TWICE: ("ownership", "freed although it was free already"),
    Reason.FREE_WHILE_OWNED: ("ownership", "freed although it still had an owner"),
    Reason.MOVE_ONTO_USED: ("ownership", "another page was moved onto it although it was in use"),
    Reason.HELD_BUT_FREE: ("ownership", "the prefix cache holds it although it is free"),
    Reason.HELD_BUT_OPEN: ("identity", "the prefix cache holds it although it was never completed"),
    Reason.HELD_IDENTITY: ("identity", "the prefix cache holds it for other tokens than it was written for"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """An event that contradicts the ledger. Owners are handles of the ledger's owner table, 0 is nobody."""

    reason: Reason
    page: int
    owner: int
    previous_owner: int
    owners: int
    state: int
    generation: int
    step: int
