"""Groups that lay their pages over the same bytes: one ledger, and each page is read for the group it is shaped for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders.harness import make_group, make_memory
from kv_canary import Budget, Settings
from kv_canary.commands import SetGroupEnabled
from kv_canary.errors import ConflictError
from kv_canary.gate import EngineGate
from kv_canary.geometry import CanaryGroup, unguarded_group
from kv_canary.ledger import HostLedger
from kv_canary.sidecar import Sidecar


class Engine:
    """Its tables are empty."""

    def __init__(self, groups: list[CanaryGroup], pages: int) -> None:
        self.ledger = HostLedger("blocks", pages, groups=len(groups))
        self.gate = EngineGate()
        self.sidecar = Sidecar(Settings(budget=Budget(), port=0), engine="test", engine_version="0")
        self.sidecar.attach(self.gate, [(self.ledger, groups)])
        self.gate.boundary(self)

    def resync(self) -> None:
        self.ledger.reset()

    def quarantine(self, space: str, page: int) -> str:
        return ""

    def sealed_pages(self) -> dict[str, int]:
        return {group.name: group.counters.sealed_pages for group in self.sidecar.settle().groups}


@pytest.fixture
def engine() -> Engine:
    memory = make_memory()
    first = make_group(memory, name="full")
    second = replace(make_group(memory, name="swa"), kind="swa")
    return Engine([first, second], len(memory))


def test_a_page_is_fingerprinted_for_the_group_that_it_was_allocated_for(engine: Engine) -> None:
    engine.ledger.allocate([1, 2, 3], "a", group=1)
    engine.ledger.allocate([4], "b", group=0)
    engine.ledger.seal([1, 2, 3, 4])
    assert engine.sealed_pages() == {"full": 1, "swa": 3}


def test_a_page_that_changes_its_group_is_new_to_the_other(engine: Engine) -> None:
    engine.ledger.allocate([1], "a", group=1)
    engine.ledger.seal([1])
    engine.ledger.release([1], "a")
    engine.ledger.free([1])
    assert engine.sealed_pages() == {"full": 0, "swa": 1}
    engine.ledger.allocate([1], "b", group=0)
    engine.ledger.seal([1])
    assert engine.sealed_pages() == {"full": 1, "swa": 1}


def test_an_adopted_page_has_the_group_that_the_engine_says(engine: Engine) -> None:
    engine.ledger.adopt([5, 6], group=1)
    assert engine.sealed_pages() == {"full": 0, "swa": 2}


def test_a_free_page_is_watched_by_one_group_only(engine: Engine) -> None:
    engine.ledger.free([7])
    assert sum(engine.sealed_pages().values()) == 1


def test_a_group_that_is_not_modelled_is_listed_and_cannot_be_switched_on() -> None:
    memory = make_memory()
    reason = "its pages move on their own"
    odd = unguarded_group("state", "state", pages=len(memory), buffers=["layer.0"], reason=reason)
    engine = Engine([make_group(memory), odd], len(memory))
    engine.ledger.allocate([1], "a", group=1)
    engine.ledger.seal([1])
    assert engine.sealed_pages() == {"full": 0, "state": 0}
    group = engine.sidecar.snapshot().group("state")
    assert group is not None
    assert (group.enabled, group.disabled_reason) == (False, reason)
    assert [(one.name, one.reason) for one in group.uncovered] == [("layer.0", reason)]
    with pytest.raises(ConflictError, match="its pages move on their own"):
        engine.sidecar.submit(SetGroupEnabled(group="state", enabled=True)).result(5)


def test_nothing_is_taken_up_late_while_work_waits_for_its_fence(engine: Engine) -> None:
    """The table says sealed as soon as the event is applied; the write may still be ahead."""

    class Ahead:
        passed = False

        def ready(self) -> bool:
            return self.passed

    fence = Ahead()
    engine.sidecar.submit(SetGroupEnabled(group="full", enabled=False)).result(5)
    engine.ledger.allocate([9], "a")
    engine.ledger.seal([9], fence=fence)
    engine.sidecar.submit(SetGroupEnabled(group="full", enabled=True)).result(5)
    assert engine.sealed_pages() == {"full": 0, "swa": 0}
    fence.passed = True
    assert engine.sealed_pages() == {"full": 1, "swa": 0}
