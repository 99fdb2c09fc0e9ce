"""The confirm protocol, step by step, without threads: what is found, what is dropped, and how it is classified."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from builders.harness import Harness
from kv_canary.ledger import Work


class BetweenReads:
    """Runs `action` after the `n`-th read of the table, as an engine would in the middle of a verification."""

    def __init__(self, harness: Harness, actions: dict[int, Callable[[], None]]) -> None:
        self._table, self._actions, self._reads = harness.verifier.table, actions, 0
        harness.verifier.table = self  # type: ignore[assignment]
        self.backend = "test"

    def _after(self) -> None:
        self._reads += 1
        self._actions.get(self._reads, lambda: None)()

    def read(self, pages):
        result = self._table.read(pages)
        self._after()
        return result

    def verify(self, pages):
        result = self._table.verify(pages)
        self._after()
        return result

    def __getattr__(self, name: str):
        return getattr(self._table, name)


def test_untouched_pages_raise_nothing() -> None:
    harness = Harness()
    harness.sealed(*range(32))
    assert harness.sweep() == []
    assert harness.verifier.counters.verified_pages == 32


@pytest.mark.parametrize("page", [0, 17, 31])
@pytest.mark.parametrize("byte", [0, 4095, 4096, 8191])
def test_one_flipped_bit_is_found_on_its_page_and_stripe(page: int, byte: int) -> None:
    harness = Harness()
    harness.sealed(*range(32))
    harness.flip(page, byte, 0x80)
    (finding,) = harness.sweep()
    assert (finding.page, finding.stripes, finding.persistence) == (page, (byte // 4096,), "persistent")


def test_open_and_unknown_pages_are_not_looked_at() -> None:
    harness = Harness()
    harness.ledger.allocate([3], "a")
    harness.apply()
    harness.flip(3)
    harness.flip(4)
    assert harness.sweep() == []
    assert harness.verifier.counters.read_bytes["sweep"] == 0


def test_a_free_page_that_changes_is_found_as_free() -> None:
    harness = Harness()
    harness.ledger.allocate([5], "a")
    harness.ledger.release([5], "a")
    harness.ledger.free([5])
    harness.apply()
    assert harness.sweep() == []
    harness.flip(5)
    (finding,) = harness.sweep()
    assert finding.free
    assert finding.page == 5


def test_a_late_write_between_seal_and_free_is_found() -> None:
    """A sealed page keeps its fingerprint when it is freed: freeing it blesses nothing."""
    harness = Harness()
    harness.sealed(6)
    harness.flip(6)
    harness.ledger.release([6], "a")
    harness.ledger.free([6])
    harness.apply()
    assert [finding.page for finding in harness.sweep()] == [6]


def test_a_page_reallocated_before_the_events_are_applied_is_left_alone() -> None:
    """The live generation protects a page even while the ledger is behind."""
    harness = Harness()
    harness.sealed(7)
    harness.ledger.release([7], "a")
    harness.ledger.free([7])
    harness.ledger.allocate([7], "b")  # recorded, not applied
    harness.flip(7)
    assert harness.sweep() == []


def test_a_page_reallocated_while_it_is_read_is_superseded() -> None:
    harness = Harness()
    harness.sealed(8)
    harness.flip(8)
    BetweenReads(harness, {1: lambda: harness.ledger.allocate([8], "b")})
    assert harness.sweep() == []
    assert harness.verifier.counters.superseded == 1


def test_a_page_reallocated_before_the_second_read_is_superseded() -> None:
    harness = Harness()
    harness.sealed(8)
    harness.flip(8)
    BetweenReads(harness, {2: lambda: harness.ledger.allocate([8], "b")})
    assert harness.sweep() == []
    assert harness.verifier.counters.superseded == 1


def test_a_reading_across_a_closed_gate_is_dropped() -> None:
    harness = Harness()
    harness.sealed(8)
    harness.flip(8)
    BetweenReads(harness, {1: harness.gate.close})
    assert harness.sweep() == []


def test_right_bytes_at_the_second_read_are_transient() -> None:
    harness = Harness()
    harness.sealed(9)
    harness.flip(9)
    BetweenReads(harness, {1: lambda: harness.flip(9)})
    (finding,) = harness.sweep()
    assert finding.persistence == "transient"
    assert len(finding.stripes) == 1


def test_other_wrong_bytes_at_the_second_read_are_changing() -> None:
    harness = Harness()
    harness.sealed(9)
    harness.flip(9)
    BetweenReads(harness, {1: lambda: harness.flip(9, 101)})
    (finding,) = harness.sweep()
    assert finding.persistence == "changing"


def test_a_seal_of_a_page_that_moves_on_while_it_is_read_is_thrown_away() -> None:
    harness = Harness()
    BetweenReads(harness, {1: lambda: harness.ledger.allocate([3], "b")})
    harness.sealed(3)
    assert not harness.verifier.is_valid(3)
    assert harness.verifier.counters.superseded == 1


def test_a_copy_is_held_against_its_source() -> None:
    """Copy-on-write: the fingerprint travels, so a copy that went wrong is found although nobody wrote it since."""
    harness = Harness()
    harness.sealed(1)
    harness.ledger.allocate([2], "b")
    harness.memory[2] = harness.memory[1]
    harness.flip(2)
    harness.ledger.move([1], [2], "b")
    harness.apply()
    assert [finding.page for finding in harness.sweep()] == [2]


def test_a_copy_of_an_open_page_stays_open() -> None:
    harness = Harness()
    harness.ledger.allocate([1], "a")
    harness.ledger.allocate([2], "b")
    harness.ledger.move([1], [2], "b")
    harness.apply()
    assert not harness.verifier.is_valid(2)


def test_a_group_that_was_off_takes_up_the_pages_sealed_meanwhile() -> None:
    harness = Harness()
    harness.ledger.allocate([1, 2], "a")
    harness.ledger.seal([1, 2])
    harness.ledger.catch_up(seconds=1.0)
    while harness.ledger.take_work() is not None:
        pass  # nobody sealed: the group was off
    assert harness.verifier.seal_missing(0, 32) == 2 * 8192
    assert harness.verifier.is_valid(1)
    assert not harness.verifier.is_valid(3)


def test_a_page_that_has_been_opened_again_is_not_taken_up_by_its_old_state() -> None:
    """The table says free, the engine has handed the page out since and is writing it."""
    harness = Harness()
    harness.ledger.free([1])
    assert harness.ledger.catch_up(seconds=1.0)
    while harness.ledger.take_work() is not None:
        pass
    harness.ledger.allocate([1], "a")  # live at once, applied later
    assert harness.verifier.seal_missing(0, 32) == 0
    harness.apply()
    assert not harness.verifier.is_valid(1)


def test_the_same_difference_is_news_once() -> None:
    harness = Harness()
    harness.sealed(4)
    harness.flip(4)
    (first,), (second,) = harness.sweep(), harness.sweep()
    assert harness.verifier.is_news(first)
    assert not harness.verifier.is_news(second)
    harness.flip(4, 200)
    (third,) = harness.sweep()
    assert harness.verifier.is_news(third)


def test_the_same_difference_is_news_again_once_the_page_was_seen_good() -> None:
    harness = Harness()
    harness.sealed(4)
    found = []
    for _ in range(2):
        harness.clock.now += 1
        harness.flip(4)
        found += harness.sweep()
        assert harness.verifier.is_news(found[-1])
        harness.clock.now += 1
        harness.flip(4)
        assert harness.sweep() == []
    assert found[0].found == found[1].found


def test_last_good_is_the_time_of_the_last_clean_reading() -> None:
    harness = Harness()
    harness.sealed(4)
    harness.clock.now += 5
    harness.sweep()
    good_at = harness.clock.now
    harness.clock.now += 7
    harness.flip(4)
    (finding,) = harness.sweep()
    assert finding.last_good == good_at


def test_work_of_an_old_generation_seals_nothing() -> None:
    harness = Harness()
    harness.ledger.allocate([3], "a")
    work = Work(kind="seal", pages=np.array([3]), generations=np.array([0]))
    pages, _ = harness.verifier.missing(work.pages, work.generations)
    assert not len(pages)


def test_tampering_with_a_stored_fingerprint_is_found_and_undone() -> None:
    harness = Harness()
    harness.sealed(3)
    before = harness.verifier.tamper(3, 1, 1 << 63)
    (finding,) = harness.sweep()
    assert finding.found == (before,)
    harness.verifier.tamper(3, 1, 1 << 63)
    assert harness.sweep() == []


def test_a_reading_that_would_begin_after_the_hooks_fell_silent_does_not_begin() -> None:
    """Somebody looked whether the gate is open, and then it closed."""
    harness = Harness()
    harness.sealed(1)
    harness.gate.close()
    harness.flip(1)
    assert harness.sweep() == []
    assert harness.verifier.counters.verified_pages == 0


def test_a_copy_of_a_free_page_is_not_guarded_while_it_is_open() -> None:
    """Nothing that the engine may go on to write has a fingerprint."""
    harness = Harness()
    harness.sealed(1)
    harness.ledger.release([1], "a")
    harness.ledger.free([1])
    harness.ledger.allocate([2], "b")
    harness.ledger.move([1], [2], "b")
    harness.apply()
    harness.flip(2)
    assert harness.sweep() == []


def test_copies_of_copies_of_an_open_page_are_held_against_themselves() -> None:
    """Forks of forks: each goes on to write its own copy, and by the time of our turn all of them are sealed."""
    harness = Harness()
    harness.ledger.allocate([0, 1, 2], "a")
    for source, target in ((0, 1), (1, 2)):
        harness.ledger.move([source], [target])
        harness.memory[target] = harness.memory[source]
    for page in (0, 1, 2):
        harness.memory[page, 100] = page
    harness.ledger.seal([0, 1, 2], [70, 71, 72])
    harness.apply()
    assert harness.sweep() == []
    harness.flip(2)
    assert [finding.page for finding in harness.sweep()] == [2]


def test_a_copy_of_a_free_page_is_held_against_itself() -> None:
    harness = Harness()
    harness.sealed(1)
    harness.ledger.release([1], "a")
    harness.ledger.free([1])
    harness.ledger.allocate([2], "b")
    harness.ledger.move([1], [2])
    harness.memory[2, :64] = 9
    harness.ledger.seal([2], 72)
    harness.apply()
    assert harness.sweep() == []
