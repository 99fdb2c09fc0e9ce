"""The short way of the page state machine leaves every column, and says of every event, what the reference does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kv_canary.ledger import Reason
from kv_canary.ledger.arrays import HostArrays
from kv_canary.ledger.short import SHORT, HostPageTable
from kv_canary.ledger.transitions import PageTable

PAGES = 3
EVENTS = (
    "allocate",
    "write",
    "seal",
    "release",
    "free",
    "claim",
    "reopen",
    "adopt",
    "move",
    "load",
    "hold",
    "forget",
    "step",
)

page_lists = st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=3)
values = st.one_of(st.integers(0, 3), st.lists(st.integers(0, 3), min_size=4, max_size=4))
events = st.lists(st.tuples(st.sampled_from(EVENTS), page_lists, values, values), min_size=8, max_size=40)

Flagged = list[tuple[Reason, int, int]]


def machines(pages: int = PAGES) -> tuple[tuple[PageTable, Flagged], tuple[PageTable, Flagged]]:
    def recorder(flagged: Flagged) -> Callable[..., None]:
        def flag(reason: Reason, batch: Any, mask: Any, owner: Any) -> None:
            owners = np.broadcast_to(owner, batch.shape)
            flagged.extend((reason, int(batch[i]), int(owners[i])) for i in np.flatnonzero(mask))

        return flag

    said: tuple[Flagged, Flagged] = ([], [])
    reference = PageTable(pages, HostArrays(), recorder(said[0]))
    short = HostPageTable(pages, HostArrays(), recorder(said[1]), lambda *flagged: said[1].append(flagged))
    return (reference, said[0]), (short, said[1])


def apply(table: PageTable, event: str, pages: list[int], first: Any, second: Any) -> None:
    array = np.array(pages, np.int64)
    one, other = (
        value if isinstance(value, int) else np.array(value[: len(pages)], np.int64) for value in (first, second)
    )
    if event == "step":
        table.step += 1
    elif event in ("allocate", "write", "seal", "release", "load", "hold"):
        getattr(table, event)(array, one)
    elif event == "claim":
        table.claim(array, one, other)
    elif event == "adopt":
        table.adopt(array, one, other, 1)
    elif event == "move":
        table.move(array, np.roll(array, 1), 0)
    else:
        getattr(table, event)(array)


@settings(max_examples=200, deadline=None)
@given(events=events)
@example(events=[("allocate", [1], 1, 0), ("claim", [1], 2, 1), ("seal", [1], 0, 0)])
@example(events=[("allocate", [1], 1, 0), ("claim", [1], 2, 1), ("seal", [1], 3, 0)])
def test_short_events_and_the_reference_agree(events: list[tuple[str, list[int], Any, Any]]) -> None:
    """Pages that occur twice, owners and identities one for all or one each, and everything out of order."""
    (reference, expected), (short, found) = machines()
    for event in events:
        apply(reference, *event)
        apply(short, *event)
        assert sorted(found) == sorted(expected)
        columns = zip(reference.columns[:-1], short.columns[:-1], strict=True)  # the last one is scratch
        assert [ours.tolist() for _, ours in columns] == [column.tolist() for column in reference.columns[:-1]]


@pytest.mark.parametrize("event", ["allocate", "write", "seal", "release", "free"])
def test_long_events_take_the_long_way(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(PageTable, event, lambda self, pages, *_: taken.append(len(pages)))
    _, (short, _) = machines(SHORT + 1)
    apply(short, event, list(range(SHORT)), 0, 0)
    apply(short, event, list(range(SHORT + 1)), 0, 0)
    assert taken == [SHORT + 1]
