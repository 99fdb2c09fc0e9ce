"""Pages that went bad together are one incident: which one a wrong page belongs to. Used by the canary thread alone.

A page joins the newest incident of its kind (same group, check, persistence, cause) if it lies beside one of its pages
or has the same owner, if it was found soon after the last of them, and if it can have been damaged by the same event:
it was not seen good after the first of them was found bad. One flipped bit is an event of its own and joins nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

JOIN_SECONDS = 2.0
KEPT = 256


@dataclass(slots=True, kw_only=True)
class Damage:
    """An incident that more pages may join."""

    incident: str
    summary: str
    found_at: float
    last_at: float
    pages: set[int] = field(default_factory=set)
    owners: set[str] = field(default_factory=set)


class Merger:
    """The newest damage of each kind. Times are those of the monotonic clock."""

    def __init__(self) -> None:
        self._open: OrderedDict[Hashable, Damage] = OrderedDict()

    def find(self, kind: Hashable, page: int, owner: str | None, last_good: float | None, now: float) -> Damage | None:
        """The damage that this page belongs to; it has joined it then. None: it is one of its own."""
        damage = self._open.get(kind)
        if damage is None or now - damage.last_at > JOIN_SECONDS or page in damage.pages:
            return None
        if last_good is not None and last_good > damage.found_at:
            return None
        beside = page - 1 in damage.pages or page + 1 in damage.pages
        if not beside and (owner is None or owner not in damage.owners):
            return None
        self._join(damage, page, owner, now)
        return damage

    def begin(self, kind: Hashable, incident: str, summary: str, page: int, owner: str | None, now: float) -> None:
        damage = Damage(incident=incident, summary=summary, found_at=now, last_at=now)
        self._join(damage, page, owner, now)
        self._open[kind] = damage
        self._open.move_to_end(kind)
        while len(self._open) > KEPT:
            self._open.popitem(last=False)

    def _join(self, damage: Damage, page: int, owner: str | None, now: float) -> None:
        damage.pages.add(page)
        damage.last_at = now
        if owner is not None:
            damage.owners.add(owner)


class LineLimit:
    """So many log lines in a stretch of time; what is held back is counted, for one line that says so."""

    def __init__(self, lines: int = 20, seconds: float = 10.0) -> None:
        self._lines, self._seconds = lines, seconds
        self._since = 0.0
        self._used = 0
        self.held_back = 0

    def allows(self, now: float) -> bool:
        if now - self._since >= self._seconds and not self.held_back:
            self._since, self._used = now, 0
        if self._used < self._lines:
            self._used += 1
            return True
        self.held_back += 1
        return False

    def hold_back(self) -> None:
        """Something that gets no line of its own."""
        self.held_back += 1

    def due(self, now: float) -> int:
        """How many were held back, once the stretch is over; 0 before, and when there are none."""
        if not self.held_back or now - self._since < self._seconds:
            return 0
        held_back, self.held_back = self.held_back, 0
        self._since, self._used = now, 0
        return held_back


def page_ranges(pages: set[int] | tuple[int, ...]) -> str:
    """`5, 7-9`."""
    runs: list[list[int]] = []
    for page in sorted(pages):
        if runs and page == runs[-1][1] + 1:
            runs[-1][1] = page
        else:
            runs.append([page, page])
    return ", ".join(f"{low}-{high}" if high > low else str(low) for low, high in runs)
