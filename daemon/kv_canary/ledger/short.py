"""The page state machine for a few pages on the host: page by page in plain Python.

A decode step touches one page here and two there, and on so few an operation of numpy costs the same microsecond as on
a thousand. The events of every step are therefore written out here once more, a tenth as dear; `PageTable` is the
reference, does what is rare or large, and the ledger's tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kv_canary.ledger.arrays import Arrays
from kv_canary.ledger.states import FREE, OPEN, SEALED, UNKNOWN, Reason
from kv_canary.ledger.transitions import Flag, PageTable

SHORT = 64  # pages: from about here on numpy is faster

FlagPage = Callable[[Reason, int, int], None]


class HostPageTable(PageTable):
    """`PageTable` in numpy arrays, with a short way for short events. Written by the applier alone."""

    def __init__(self, pages: int, arrays: Arrays, flag: Flag, flag_page: FlagPage) -> None:
        super().__init__(pages, arrays, flag)
        self._flag_page = flag_page
        # views of the same memory whose items are plain integers
        self._state = memoryview(self.state)
        self._generation = memoryview(self.generation)
        self._owners = memoryview(self.owners)
        self._owner = memoryview(self.owner)
        self._previous_owner = memoryview(self.previous_owner)
        self._identity = memoryview(self.identity)
        self._claim_identity = memoryview(self.claim_identity)
        self._written_step = memoryview(self.written_step)
        self._changed_step = memoryview(self.changed_step)

    def allocate(self, pages: Any, owner: Any) -> None:
        if (short := _short(pages)) is None:
            return super().allocate(pages, owner)
        for page, one in zip(short, _each(owner, len(short)), strict=True):
            self._generation[page] += 1
            self._give_up_claim(page, one)
            self._owners[page] += 1
            if self._owners[page] > 1:
                self._flag_page(Reason.TWO_OWNERS, page, one)
            if held := self._owner[page]:
                self._previous_owner[page] = held
            self._owner[page] = one
            self._identity[page] = 0
            self._state[page] = OPEN
            self._changed_step[page] = self.step
        return None

    def write(self, pages: Any, owner: Any) -> None:
        if (short := _short(pages)) is None:
            return super().write(pages, owner)
        for page, one in zip(short, _each(owner, len(short)), strict=True):
            state, held = self._state[page], self._owner[page]
            if state == SEALED:
                self._flag_page(Reason.WRITE_TO_SEALED, page, one)
            elif state == FREE:
                self._flag_page(Reason.WRITE_TO_FREE, page, one)
            elif state == OPEN and not held:
                self._owner[page] = one  # of the first who writes, where the allocator did not know for whom
            elif state == OPEN and one and held != one:
                self._flag_page(Reason.WRITE_TO_FOREIGN, page, one)
            self._written_step[page] = self.step
        return None

    def seal(self, pages: Any, identity: Any) -> None:
        if (short := _short(pages)) is None:
            return super().seal(pages, identity)
        for page, one in zip(short, _each(identity, len(short)), strict=True):
            if self._state[page] == FREE:
                self._flag_page(Reason.SEAL_OF_FREE, page, 0)
            else:
                claimed = self._claim_identity[page]
                if claimed and one and claimed != one:
                    self._flag_page(Reason.CLAIM_IDENTITY, page, self._owner[page])
                self._claim_identity[page] = 0
                self._state[page] = SEALED
            self._identity[page] = one
            self._changed_step[page] = self.step
        return None

    def release(self, pages: Any, owner: Any) -> None:
        if (short := _short(pages)) is None:
            return super().release(pages, owner)
        for page, one in zip(short, _each(owner, len(short)), strict=True):
            left = self._owners[page] - 1
            self._owners[page] = max(0, left)
            if left < 0 and self._state[page] != UNKNOWN:
                self._flag_page(Reason.RELEASE_WITHOUT_OWNER, page, one)
            if left <= 0 or self._owner[page] == one:
                self._disown_page(page)
        return None

    def free(self, pages: Any) -> None:
        if (short := _short(pages)) is None:
            return super().free(pages)
        for page in short:
            if self._state[page] == FREE:
                self._flag_page(Reason.FREE_TWICE, page, 0)
            if self._owners[page] > 0:
                self._flag_page(Reason.FREE_WHILE_OWNED, page, self._owner[page])
            self._give_up_claim(page, 0)
            self._owners[page] = 0
            self._disown_page(page)
            self._state[page] = FREE
            self._changed_step[page] = self.step
        return None

    def _give_up_claim(self, page: int, owner: int) -> None:
        if self._claim_identity[page]:
            self._flag_page(Reason.CLAIMED_NEVER_SEALED, page, owner)
            self._claim_identity[page] = 0

    def _disown_page(self, page: int) -> None:
        if held := self._owner[page]:
            self._previous_owner[page] = held
            self._owner[page] = 0


def _short(pages: Any) -> list[int] | None:
    """The pages one by one; None if they are many, or one occurs twice (an event raises a generation once)."""
    if len(pages) > SHORT:
        return None
    short: list[int] = pages.tolist()
    return short if len(set(short)) == len(short) else None


def _each(value: Any, count: int) -> list[int]:
    if isinstance(value, int):
        return [value] * count
    values = value.tolist()
    return values if isinstance(values, list) else [values] * count
