"""What the scheduler tells the workers with every step: one attribute of the SchedulerOutput, made of plain values.

Plain values, because a worker on another machine may not have this package: it could not unpickle a class of ours and
the server would go down.

    {"step": 17, "mailbox": "kv-canary-...",          counts up by one; where to ask
     "names": {3: "cmpl-..."},                        request names of new owner handles
     "events": [("allocate", [([5, 6], 3, 0)]), ...], in order of time; absent while none are recorded
     "tables": [...], "tables_at": 2,                 events that tell every page's state, only when asked for; they
                                                      stand for the first two of the events
     "reactions": [(0, "inc-000001", "..."), ...],    what came of quarantines: rank, incident, text
     "failed": ("allocate", "KeyError: ...")}         the scheduler's hooks have fallen silent, and why

The events follow the writes: a step's seals come first (they are complete once what was launched before has run), and
what raises a generation comes before the step that may write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kv_canary.ledger import Fence, Ledger

ATTRIBUTE = "kv_canary"

Event = Sequence[Any]
_FENCED = ("seal", "free", "adopt")
Message = dict[str, Any]


class Replay:
    """Applies a scheduler's events to a worker's ledger. On the worker's engine thread."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._names: dict[int, str] = {0: ""}

    def learn(self, names: dict[int, str]) -> None:
        self._names.update(names)

    def apply(self, events: Sequence[Event], make_fence: Callable[[], Fence | None]) -> None:
        """`make_fence` makes one that stands behind all work launched so far: seals and frees wait for it."""
        ledger, name = self._ledger, self._names.get
        fence: Fence | None = None
        if any(event[0] in _FENCED for event in events):
            fence = make_fence()
        for event in events:
            match event:
                case ("write", pages, owners):
                    ledger.write(pages, [name(owner, "") for owner in owners])
                case ("seal", pages, identities):
                    ledger.seal(pages, identities, fence=fence)
                case ("allocate", shares):
                    for pages, owner, group in shares:
                        ledger.allocate(pages, name(owner, ""), group=group)
                case ("claim", pages, identities, owner):
                    ledger.claim(pages, identities, name(owner, ""))
                case ("release", pages, owner):
                    ledger.release(pages, name(owner, ""))
                case ("free", pages):
                    ledger.free(pages, fence=fence)
                case ("adopt", pages, identities, owners, counts, group):
                    named = [name(owner, "") for owner in owners]
                    ledger.adopt(pages, identities, named, owners=counts, group=group, fence=fence)
                case ("gone", owners):
                    for owner in owners:
                        self._names.pop(owner, None)


def pages_of(blocks: Sequence[Any]) -> list[int]:
    """Page numbers of `KVCacheBlock`s; the null block stands for no page."""
    return [block.block_id for block in blocks if not block.is_null]
