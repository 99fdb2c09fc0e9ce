"""What each event means and when it is a violation, on every kind of ledger."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from builders.ledgers import KINDS, Driver
from kv_canary.ledger import FREE, LOADING, OPEN, SEALED, UNKNOWN, HostLedger, Reason
from kv_canary.ledger.base import OwnerNames
from kv_canary.snapshot import CHECKS


@pytest.fixture(params=KINDS)
def driver(request: pytest.FixtureRequest) -> Driver:
    return Driver(request.param)


@pytest.fixture
def host() -> Driver:
    return Driver("host")


def sealed(driver: Driver, page: int = 1, identity: int = 70, owner: str = "a") -> Driver:
    """A page that `owner` wrote and sealed a step ago."""
    driver.do("allocate", [page], owner)
    driver.do("write", [page], owner)
    driver.do("step")
    driver.do("seal", [page], [identity])
    assert driver.wrong() == set()
    driver.work()
    return driver


# What events do to a page


def test_a_page_is_unknown_before_its_first_event(driver: Driver) -> None:
    row = driver.row(1)
    assert (row.state, row.generation, row.owner, row.owners, row.identity) == (UNKNOWN, 0, None, 0, 0)


def test_allocate_opens_a_page_raises_its_generation_and_names_its_owner(driver: Driver) -> None:
    driver.do("allocate", [1], "a")
    row = driver.row(1)
    assert (row.state, row.generation, row.owner, row.owners) == (OPEN, 1, "a", 1)
    assert driver.wrong() == set()


def test_events_touch_no_other_page(driver: Driver) -> None:
    sealed(driver)
    driver.do("reopen", [1])
    driver.do("release", [1], "a")
    driver.do("free", [1])
    driver.do("forget", [1])
    assert driver.states() == [UNKNOWN] * 8
    assert driver.generations() == [0, 3, 0, 0, 0, 0, 0, 0]


def test_a_legal_life_of_a_page_is_no_violation(driver: Driver) -> None:
    for owner in ("a", "b"):
        driver.do("allocate", [1, 2], owner)
        driver.do("write", [1, 2], owner)
        driver.do("step")
        driver.do("seal", [1, 2], [70, 80])
        driver.do("claim", [1, 2], [70, 80], "reader")
        driver.do("release", [1, 2], owner)
        driver.do("release", [2, 1], "reader")
        driver.do("free", [1, 2])
    assert driver.wrong() == set()
    assert driver.generations() == [0, 2, 2, 0, 0, 0, 0, 0]


def test_seal_keeps_the_identity_and_the_generation(driver: Driver) -> None:
    row = sealed(driver).row(1)
    assert (row.state, row.generation, row.identity, row.owner) == (SEALED, 1, 70, "a")


def test_an_unknown_page_may_be_sealed(driver: Driver) -> None:
    driver.do("seal", [1], [70])
    assert (driver.row(1).state, driver.wrong()) == (SEALED, set())


def test_a_claim_adds_an_owner(driver: Driver) -> None:
    sealed(driver).do("claim", [1], [70], "b")
    row = driver.row(1)
    assert (row.state, row.owners, row.owner, driver.wrong()) == (SEALED, 2, "a", set())


def test_a_claim_of_a_page_without_owner_makes_the_claimer_its_owner(driver: Driver) -> None:
    sealed(driver).do("release", [1], "a")
    driver.do("claim", [1], [70], "b")
    row = driver.row(1)
    assert (row.owner, row.owners, row.previous_owner) == ("b", 1, "a")


def test_a_claim_may_name_one_identity_for_all_pages(driver: Driver) -> None:
    sealed(driver).do("claim", [1], 70, "b")
    assert driver.wrong() == set()


def test_reopen_opens_a_sealed_page_and_raises_its_generation(driver: Driver) -> None:
    sealed(driver).do("reopen", [1])
    row = driver.row(1)
    assert (row.state, row.generation, row.identity, row.owner) == (OPEN, 2, 0, "a")
    driver.do("write", [1], "a")
    assert driver.wrong() == set()


def test_adopt_seals_what_is_found_with_its_owners(driver: Driver) -> None:
    driver.do("adopt", [1, 2], [70, 80], 5, owners=[2, 1])
    assert [(r.state, r.generation, r.identity, r.owners, r.owner) for r in map(driver.row, (1, 2))] == [
        (SEALED, 0, 70, 2, "request#5"),
        (SEALED, 0, 80, 1, "request#5"),
    ]
    assert driver.wrong() == set()


def test_adopt_forgets_a_claim_that_waited_for_a_seal(driver: Driver) -> None:
    """What is found at that moment says nothing about a claim from before."""
    driver.do("allocate", [1], "a")
    driver.do("claim", [1], [70], "b")
    driver.do("adopt", [1], [80], "a", owners=2)
    driver.do("release", [1, 1], "a")
    driver.do("free", [1])
    assert driver.wrong() == set()


@pytest.mark.parametrize("order", [("a", "b", "c"), ("c", "b", "a"), ("b", "a", "c"), ("b", "c", "a")])
def test_shared_owners_may_release_in_any_order(driver: Driver, order: tuple[str, ...]) -> None:
    sealed(driver).do("claim", [1], [70], "b")
    driver.do("claim", [1], [70], "c")
    for left, owner in zip((2, 1, 0), order, strict=True):
        assert driver.row(1).owners == left + 1
        driver.do("release", [1], owner)
        assert driver.row(1).owners == left
    driver.do("free", [1])
    row = driver.row(1)
    assert (row.state, row.owner, driver.wrong()) == (FREE, None, set())


def test_the_owner_named_is_never_one_that_has_released(driver: Driver) -> None:
    sealed(driver).do("claim", [1], [70], "b")
    driver.do("release", [1], "a")
    row = driver.row(1)
    assert (row.owner, row.owners, row.previous_owner) == (None, 1, "a")


def test_the_last_holder_may_write_an_open_page_after_its_first_owner_has_left(driver: Driver) -> None:
    driver.do("allocate", [1], "a")
    driver.do("claim", [1], 0, "b")
    driver.do("release", [1], "a")
    driver.do("write", [1], "b")
    assert driver.wrong() == set()


def test_a_released_page_keeps_its_state_and_bytes(driver: Driver) -> None:
    sealed(driver).do("release", [1], "a")
    row = driver.row(1)
    assert (row.state, row.identity, row.generation, row.owners) == (SEALED, 70, 1, 0)


def test_free_ends_ownership_and_keeps_the_generation(driver: Driver) -> None:
    sealed(driver).do("release", [1], "a")
    driver.do("free", [1])
    row = driver.row(1)
    assert (row.state, row.generation, row.owner, row.previous_owner) == (FREE, 1, None, "a")


def test_an_unknown_page_may_be_freed(driver: Driver) -> None:
    driver.do("free", [1])
    assert (driver.row(1).state, driver.wrong()) == (FREE, set())


def test_allocate_after_free_forgets_the_identity(driver: Driver) -> None:
    sealed(driver).do("release", [1], "a")
    driver.do("free", [1])
    driver.do("allocate", [1], "b")
    row = driver.row(1)
    assert (row.state, row.identity, row.generation, row.owner, row.previous_owner) == (OPEN, 0, 2, "b", "a")
    assert driver.wrong() == set()


def test_move_from_a_sealed_page_seals_the_target_with_its_identity(driver: Driver) -> None:
    sealed(driver).do("allocate", [2], "b")
    driver.do("move", [1], [2], "b")
    row = driver.row(2)
    assert (row.state, row.identity, row.generation, row.owner) == (SEALED, 70, 1, "b")
    assert (driver.row(1).state, driver.wrong()) == (SEALED, set())


def test_move_from_an_open_page_leaves_the_target_open(driver: Driver) -> None:
    driver.do("allocate", [1], "a")
    driver.do("allocate", [2], "b")
    driver.do("move", [1], [2], "b")
    row = driver.row(2)
    assert (row.state, row.identity, driver.wrong()) == (OPEN, 0, set())


def test_forget_makes_a_page_unknown_and_raises_its_generation(driver: Driver) -> None:
    sealed(driver).do("forget", [1])
    row = driver.row(1)
    assert (row.state, row.generation, row.owner, row.owners, row.identity) == (UNKNOWN, 2, None, 0, 0)
    driver.do("allocate", [1], "b")
    assert driver.wrong() == set()


def test_reset_makes_all_pages_unknown_and_raises_every_generation(driver: Driver) -> None:
    sealed(driver).do("reset")
    assert driver.states() == [UNKNOWN] * 8
    assert driver.generations() == [1, 2, 1, 1, 1, 1, 1, 1]
    row = driver.row(1)
    assert (row.generation, row.owners, row.owner, row.identity) == (2, 0, None, 0)


@pytest.mark.parametrize("applied", [True, False])
def test_reset_drops_the_work_from_before(driver: Driver, applied: bool) -> None:
    driver.do("seal", [1], [70])
    if applied:
        driver.apply()
    driver.do("reset")
    driver.do("adopt", [2], [80])
    assert [(work.kind, work.pages.tolist(), work.generations.tolist()) for work in driver.work()] == [
        ("adopt", [2], [1])
    ]


def test_after_a_reset_the_engine_may_name_the_owner_of_what_was_allocated_before(driver: Driver) -> None:
    sealed(driver).do("reset")
    driver.do("allocate", [1], "a")
    driver.do("free", [2])
    assert driver.wrong() == set()


def test_steps_are_counted_through_a_reset(driver: Driver) -> None:
    assert driver.apply().engine_step == 1
    driver.do("step")
    driver.do("step")
    driver.do("reset")
    driver.do("step")
    assert driver.apply().engine_step == 4


def test_the_step_of_the_last_change_is_known(driver: Driver) -> None:
    driver.do("step")
    driver.do("allocate", [1], "a")
    driver.do("step")
    driver.do("write", [1], "a")
    assert driver.row(1).changed_step == 2


def test_events_of_no_pages_do_nothing(driver: Driver) -> None:
    for event in ("allocate", "write", "seal", "claim", "reopen", "adopt", "release", "free", "forget"):
        driver.do(event, [])
    driver.do("move", [], [])
    assert (driver.wrong(), driver.states(), driver.generations()) == (set(), [UNKNOWN] * 8, [0] * 8)


def test_only_events_after_which_a_page_may_be_written_raise_its_generation(driver: Driver) -> None:
    raised = {}
    for event in ("allocate", "write", "seal", "claim", "reopen", "adopt", "release", "free", "forget"):
        before = driver.generations()[1]
        driver.do(event, [1])
        raised[event] = driver.generations()[1] - before
    driver.do("move", [0], [1])
    assert driver.generations()[1] == sum(raised.values())
    assert {event for event, amount in raised.items() if amount} == {"allocate", "reopen", "forget"}
    assert set(raised.values()) == {0, 1}


# Violations, one reason each


def test_two_owners(driver: Driver) -> None:
    sealed(driver).do("allocate", [1, 2], "b")
    (violation,) = driver.violations()
    assert (violation.reason, violation.page, violation.owners, violation.generation) == (Reason.TWO_OWNERS, 1, 2, 2)
    assert driver.ledger.owner_name(violation.owner) == "b"
    assert driver.ledger.owner_name(violation.previous_owner) == "a"


def test_two_owners_in_one_call(driver: Driver) -> None:
    driver.do("allocate", [1, 2, 1], "a")
    assert driver.wrong() == {(Reason.TWO_OWNERS, 1)}
    assert [driver.row(page).owners for page in (1, 2)] == [2, 1]
    assert driver.generations()[1] >= 1


def test_two_owners_when_an_unknown_page_was_claimed(driver: Driver) -> None:
    driver.do("claim", [1], [70], "a")
    driver.do("allocate", [1], "b")
    assert driver.wrong() == {(Reason.TWO_OWNERS, 1)}


def test_write_to_sealed(driver: Driver) -> None:
    sealed(driver).do("write", [1, 2], "a")
    assert driver.wrong() == {(Reason.WRITE_TO_SEALED, 1)}


def test_write_to_free(driver: Driver) -> None:
    driver.do("free", [1])
    driver.do("write", [1], "a")
    assert driver.wrong() == {(Reason.WRITE_TO_FREE, 1)}


def test_reopen_of_a_free_page_is_a_write_to_free(driver: Driver) -> None:
    driver.do("free", [1])
    driver.do("reopen", [1])
    assert driver.wrong() == {(Reason.WRITE_TO_FREE, 1)}


def test_write_to_foreign(driver: Driver) -> None:
    driver.do("allocate", [1], "a")
    driver.do("write", [1], "b")
    (violation,) = driver.violations()
    assert (violation.reason, driver.ledger.owner_name(violation.owner)) == (Reason.WRITE_TO_FOREIGN, "b")


@pytest.mark.parametrize(("owner", "writer"), [("", "b"), ("a", ""), ("a", "a")])
def test_a_write_is_foreign_only_when_both_names_are_known(driver: Driver, owner: str, writer: str) -> None:
    driver.do("allocate", [1], owner)
    driver.do("write", [1], writer)
    assert driver.wrong() == set()


def test_seal_of_free(driver: Driver) -> None:
    driver.do("free", [1])
    driver.do("seal", [1], [70])
    assert driver.wrong() == {(Reason.SEAL_OF_FREE, 1)}
    assert driver.row(1).state == FREE


def test_claim_of_open(driver: Driver) -> None:
    """Written in an earlier step and not sealed since: nobody waits for its bytes any more."""
    driver.do("allocate", [1], "a")
    driver.do("write", [1], "a")
    driver.do("step")
    driver.do("claim", [1], [70], "b")
    assert driver.wrong() == {(Reason.CLAIM_OF_OPEN, 1)}


def test_a_claim_of_a_page_that_this_step_writes_waits_for_the_seal(driver: Driver) -> None:
    driver.do("allocate", [1], "a")
    driver.do("step")
    driver.do("write", [1], "a")
    driver.do("claim", [1], [70], "b")
    driver.do("seal", [1], [70])
    assert (driver.wrong(), driver.row(1).owners) == (set(), 2)


def test_a_waiting_claim_with_the_wrong_identity_is_found_at_the_seal(driver: Driver) -> None:
    driver.do("allocate", [1], "a")
    driver.do("claim", [1], [71], "b")
    assert driver.wrong() == set()
    driver.do("step")
    driver.do("seal", [1], [70])
    assert driver.wrong() == {(Reason.CLAIM_IDENTITY, 1)}


def test_a_waiting_claim_is_judged_once(driver: Driver) -> None:
    driver.do("allocate", [1], "a")
    driver.do("claim", [1], [70], "b")
    driver.do("seal", [1], [70])
    driver.do("reopen", [1])
    driver.do("seal", [1], [90])
    assert driver.wrong() == set()


def test_two_waiting_claims_of_different_identities_cannot_both_be_right(driver: Driver) -> None:
    driver.do("allocate", [1], "a")
    driver.do("claim", [1], [71], "b")
    driver.do("claim", [1], [70], "c")
    assert driver.wrong() == {(Reason.CLAIM_IDENTITY, 1)}


def test_a_waiting_claim_is_not_forgotten_for_one_that_knows_no_identity(driver: Driver) -> None:
    driver.do("allocate", [1], "a")
    driver.do("claim", [1], [71], "b")
    driver.do("claim", [1], 0, "c")
    driver.do("seal", [1], [70])
    assert driver.wrong() == {(Reason.CLAIM_IDENTITY, 1)}


@pytest.mark.parametrize(("identity", "wrong"), [(70, set()), (71, {(Reason.CLAIM_IDENTITY, 2)})])
def test_a_waiting_claim_is_judged_when_a_move_seals_its_page(driver: Driver, identity: int, wrong: set[Any]) -> None:
    sealed(driver).do("allocate", [2], "b")
    driver.do("claim", [2], [identity], "c")
    driver.do("move", [1], [2], "b")
    assert driver.wrong() == wrong
    driver.do("release", [2, 2], "b")
    driver.do("free", [2])
    assert driver.wrong() == set()


def test_claim_of_free(driver: Driver) -> None:
    driver.do("free", [1])
    driver.do("claim", [1], [70], "b")
    assert driver.wrong() == {(Reason.CLAIM_OF_FREE, 1)}


def test_claim_of_loading(driver: Driver) -> None:
    driver.do("allocate", [1], "a")
    driver.do("load", [1], "a")
    driver.do("claim", [1], [70], "b")
    assert driver.wrong() == {(Reason.CLAIM_OF_LOADING, 1)}


# Tiers


def test_load_raises_the_generation_before_the_copy_and_keeps_the_owner(driver: Driver) -> None:
    driver.do("allocate", [1], "a")
    driver.do("load", [1])
    row = driver.row(1)
    assert (row.state, row.generation, row.owner, row.owners, row.identity) == (LOADING, 2, "a", 1, 0)
    assert driver.wrong() == set()


def test_load_is_a_write_and_judged_as_one(driver: Driver) -> None:
    sealed(driver, page=1)
    driver.do("free", [2])
    driver.do("allocate", [3, 4], "a")
    driver.do("load", [1, 2, 3, 4], driver_owners(driver, ["a", "a", "b", "a"]))
    assert driver.wrong() == {
        (Reason.WRITE_TO_SEALED, 1),
        (Reason.WRITE_TO_FREE, 2),
        (Reason.WRITE_TO_FOREIGN, 3),
    }


def driver_owners(driver: Driver, names: list[str]) -> Any:
    return names if driver.kind == "host" else [driver.ledger._owner(name) for name in names]  # type: ignore[attr-defined]


def test_admit_seals_with_the_identity_that_left(driver: Driver) -> None:
    sealed(driver, page=1, identity=70)
    manifest = driver.ledger.export(driver.array([1]))
    driver.do("allocate", [2], "b")
    driver.do("load", [2], "b")
    driver.ledger.admit(driver.array([2]), manifest)
    row = driver.row(2)
    assert (row.state, row.generation, row.identity, row.owner) == (SEALED, 2, 70, "b")
    assert driver.wrong() == set()
    driver.do("claim", [2], [71], "c")
    assert driver.wrong() == {(Reason.CLAIM_IDENTITY, 2)}


def test_an_engine_that_says_what_it_loads_is_taken_at_its_word(driver: Driver) -> None:
    sealed(driver, page=1, identity=70)
    manifest = driver.ledger.export(driver.array([1]))
    driver.do("allocate", [2, 3], "b")
    driver.ledger.admit(driver.array([2]), manifest, driver.array([71]))
    driver.ledger.admit(driver.array([3]), manifest, 72)
    assert (driver.row(2).identity, driver.row(3).identity) == (71, 72)
    told = [work.identities for work in driver.work() if work.kind == "admit"]
    assert [np.asarray(one).reshape(-1).tolist() for one in told] == [[71], [72]]


def test_export_and_admit_leave_work_in_their_places(driver: Driver) -> None:
    """An export says which pages were complete then; what happens to them afterwards changes nothing in it."""
    sealed(driver, page=1, identity=70)
    driver.do("allocate", [2], "a")
    manifest = driver.ledger.export(driver.array([1, 2, 1]))
    driver.do("release", [1], "a")
    driver.do("free", [1])
    driver.do("allocate", [1], "b")
    driver.ledger.admit(driver.array([1]), manifest.part([0]))
    export, free, admit = driver.work()
    assert [work.kind for work in (export, free, admit)] == ["export", "free", "admit"]
    assert (export.pages.tolist(), export.generations.tolist()) == ([1, 2, 1], [1, -1, 1])
    assert np.asarray(export.identities).tolist() == [70, 0, 70]
    assert (admit.pages.tolist(), admit.generations.tolist()) == ([1], [2])
    assert manifest.pending


def test_an_admit_of_a_free_page_is_wrong(driver: Driver) -> None:
    sealed(driver, page=1)
    manifest = driver.ledger.export(driver.array([1]))
    driver.do("free", [2])
    driver.ledger.admit(driver.array([2]), manifest)
    assert driver.wrong() == {(Reason.SEAL_OF_FREE, 2)}


def test_nobody_waits_for_a_manifest_that_a_reset_left_behind(driver: Driver) -> None:
    sealed(driver, page=1)
    manifests = [driver.ledger.export(driver.array([1]))]
    driver.do("reset")
    manifests.append(driver.ledger.export(driver.array([1])))
    driver.do("reset")  # the second one before the first was looked at
    driver.apply()
    assert [manifest.copies for manifest in manifests] == [(None,), (None,)]


@pytest.mark.parametrize("kind", ["tensor", "kernel"])
def test_padding_keeps_the_rows_of_a_manifest_in_their_places(kind: str) -> None:
    driver = Driver(kind, padding=0)
    sealed(driver, page=3)
    sealed(driver, page=0)
    manifest = driver.ledger.export(driver.array([-1, 3, 99, 0]))
    if kind == "kernel":  # torch takes -1 for the last page
        driver.ledger.admit(driver.array([-1, 4, 99, 0]), manifest)
    works = driver.work()
    assert [work.generations.tolist() for work in works] == [[-1, 1, -1, -1], [-1, 0, -1, -1]][: len(works)]
    assert all(((work.pages >= 0) & (work.pages < 8)).all() for work in works)


def test_the_first_named_writer_owns_a_page_that_nobody_is_named_for(driver: Driver) -> None:
    driver.do("allocate", [1, 2])
    driver.do("write", [1])
    driver.do("write", [1], "a")
    assert (driver.row(1).owner, driver.row(2).owner) == ("a", None)
    assert driver.wrong() == set()
    driver.do("write", [1, 2], "b")
    assert driver.wrong() == {(Reason.WRITE_TO_FOREIGN, 1)}
    assert (driver.row(1).owner, driver.row(2).owner) == ("a", "b")


def test_claim_identity(driver: Driver) -> None:
    sealed(sealed(driver), page=2, identity=80).do("claim", [1, 2], [70, 81], "b")
    (violation,) = driver.violations()
    assert (violation.reason, violation.page) == (Reason.CLAIM_IDENTITY, 2)
    assert driver.ledger.owner_name(violation.owner) == "b"


@pytest.mark.parametrize(("known", "claimed"), [(0, 70), (70, 0), (0, 0)])
def test_an_identity_that_is_not_known_is_no_mismatch_but_not_covered(driver: Driver, known: int, claimed: int) -> None:
    sealed(driver, identity=known).do("claim", [1], [claimed], "b")
    assert driver.wrong() == set()
    assert (driver.apply().claims, driver.ledger.claims_not_covered) == (1, 1)


def test_a_claim_of_an_unknown_page_is_no_mismatch_but_not_covered(driver: Driver) -> None:
    sealed(driver).do("claim", [1, 2, 3], [70, 80, 90], "b")
    assert driver.wrong() == set()
    assert (driver.apply().claims, driver.ledger.claims_not_covered) == (3, 2)
    assert (driver.row(2).state, driver.row(2).owner, driver.row(2).owners) == (UNKNOWN, "b", 1)


@pytest.mark.parametrize("event", ["free", "allocate"])
def test_claimed_never_sealed(driver: Driver, event: str) -> None:
    driver.do("allocate", [1], "a")
    driver.do("claim", [1], [70], "b")
    driver.do("release", [1, 1], "a")
    assert driver.wrong() == set()
    driver.do(event, [1])
    assert driver.wrong() == {(Reason.CLAIMED_NEVER_SEALED, 1)}


def test_release_without_owner(driver: Driver) -> None:
    sealed(driver).do("release", [1], "a")
    driver.do("release", [1], "a")
    assert driver.wrong() == {(Reason.RELEASE_WITHOUT_OWNER, 1)}
    assert driver.row(1).owners == 0


def test_release_without_owner_in_one_call(driver: Driver) -> None:
    sealed(driver).do("release", [1, 1], "a")
    assert driver.wrong() == {(Reason.RELEASE_WITHOUT_OWNER, 1)}
    assert driver.row(1).owners == 0


def test_free_twice(driver: Driver) -> None:
    driver.do("free", [1])
    driver.do("free", [2, 1])
    assert driver.wrong() == {(Reason.FREE_TWICE, 1)}


def test_free_twice_in_one_call(driver: Driver) -> None:
    driver.do("free", [1, 2, 1])
    assert driver.wrong() == {(Reason.FREE_TWICE, 1)}


def test_the_same_page_in_two_calls_is_not_freed_twice(driver: Driver) -> None:
    driver.do("free", [1])
    driver.do("allocate", [1])
    driver.do("release", [1])
    driver.do("free", [1])
    assert driver.wrong() == set()


def test_free_while_owned(driver: Driver) -> None:
    sealed(driver).do("free", [1])
    (violation,) = driver.violations()
    assert (violation.reason, driver.ledger.owner_name(violation.owner)) == (Reason.FREE_WHILE_OWNED, "a")
    assert (driver.row(1).owners, driver.row(1).state) == (0, FREE)


@pytest.mark.parametrize("target", ["sealed", "free", "another's"])
def test_move_onto_used(driver: Driver, target: str) -> None:
    sealed(driver)
    if target == "sealed":
        sealed(driver, page=2, owner="b")
    elif target == "free":
        driver.do("free", [2])
    else:
        driver.do("allocate", [2], "c")
    driver.do("move", [1], [2], "b")
    assert driver.wrong() == {(Reason.MOVE_ONTO_USED, 2)}


def test_a_move_onto_a_page_whose_owner_is_not_known_is_no_violation(driver: Driver) -> None:
    sealed(driver).do("allocate", [2])
    driver.do("move", [1], [2], "b")
    assert driver.wrong() == set()


def test_a_page_that_occurs_twice_in_a_call_is_wrong_if_one_of_the_two_is(driver: Driver) -> None:
    for identities in ([71, 70], [70, 71]):
        driver.do("reset")
        sealed(driver).do("claim", [1, 1], identities, "b")
        assert driver.wrong() == {(Reason.CLAIM_IDENTITY, 1)}


def test_violations_are_taken_once(driver: Driver) -> None:
    driver.do("free", [1])
    driver.do("free", [1])
    assert len(driver.violations()) == 1
    assert driver.violations() == []


def test_a_violation_says_in_which_step_and_state(driver: Driver) -> None:
    driver.do("step")
    driver.do("free", [3])
    driver.do("write", [3], "a")
    (violation,) = driver.violations()
    assert (violation.step, violation.state, violation.page, violation.generation) == (2, FREE, 3, 0)


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_check_and_a_text(reason: Reason) -> None:
    assert reason.check in CHECKS
    assert reason.text


def test_reasons_are_not_renumbered() -> None:
    """They are stored in device memory."""
    assert [reason.name for reason in sorted(Reason)] == [
        "TWO_OWNERS",
        "WRITE_TO_SEALED",
        "WRITE_TO_FREE",
        "WRITE_TO_FOREIGN",
        "SEAL_OF_FREE",
        "CLAIM_OF_OPEN",
        "CLAIM_OF_FREE",
        "CLAIM_OF_LOADING",
        "CLAIM_IDENTITY",
        "CLAIMED_NEVER_SEALED",
        "RELEASE_WITHOUT_OWNER",
        "FREE_TWICE",
        "FREE_WHILE_OWNED",
        "MOVE_ONTO_USED",
        "HELD_BUT_FREE",
        "HELD_BUT_OPEN",
        "HELD_IDENTITY",
    ]
    assert [int(reason) for reason in sorted(Reason)] == list(range(1, 18))


# Work


def test_work_is_left_in_the_order_of_the_events_with_the_generations_of_that_moment(driver: Driver) -> None:
    driver.do("allocate", [1, 2], "a")
    driver.do("seal", [1, 2], [70, 80])
    driver.do("claim", [2], [80], "b")
    driver.do("allocate", [3], "a")
    driver.do("move", [1], [3], "a")
    driver.do("reopen", [1])
    driver.do("seal", [1], [90])
    driver.do("free", [2])
    driver.do("adopt", [5], [10])
    assert [(work.kind, work.pages.tolist(), work.generations.tolist()) for work in driver.work()] == [
        ("seal", [1, 2], [1, 1]),
        ("claim", [2], [1]),
        ("move", [3], [1]),
        ("seal", [1], [2]),
        ("free", [2], [1]),
        ("adopt", [5], [0]),
    ]
    assert driver.ledger.take_work() is None


def test_a_move_leaves_its_sources_and_the_generations_of_those_that_were_sealed(driver: Driver) -> None:
    sealed(driver).do("reopen", [1])
    driver.do("seal", [1], 70)
    driver.do("free", [4])
    driver.do("allocate", [5], "a")
    driver.work()
    driver.do("move", [1, 0, 4, 5], [3, 2, 6, 7])
    driver.do("seal", [0, 4, 5], 80)  # afterwards: too late
    move, _ = driver.work()
    assert (move.sources.tolist(), move.source_generations.tolist()) == ([1, 0, 4, 5], [2, -1, -1, -1])


def test_work_comes_as_host_arrays(driver: Driver) -> None:
    driver.do("seal", [1], [70])
    (work,) = driver.work()
    assert (type(work.pages), type(work.generations)) == (np.ndarray, np.ndarray)
    assert work.pages.dtype == work.generations.dtype == np.int64


def test_work_waits_until_the_engine_s_stream_has_come_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page numbers are not there before, and neither are the bytes."""

    class Point:
        passed = False

        def query(self) -> bool:
            return self.passed

    driver, points = Driver("tensor"), [Point(), Point()]
    coming = iter(points)
    monkeypatch.setattr(driver.ledger, "_here", lambda: next(coming))
    driver.do("seal", [1], [70])
    driver.do("seal", [2], [80])
    assert driver.work() == []
    points[1].passed = True
    assert driver.work() == []  # in order
    points[0].passed = True
    assert [work.pages.tolist() for work in driver.work()] == [[1], [2]]


@pytest.mark.parametrize("event", ["seal", "free", "adopt", "move"])
def test_a_fence_travels_with_its_work(driver: Driver, event: str) -> None:
    class Fence:
        def ready(self) -> bool:
            return False

    fence = Fence()
    driver.do(event, [1], *([[2]] if event == "move" else []), fence=fence)
    (work,) = driver.work()
    assert (work.kind, work.fence) == (event, fence)


def test_work_does_not_change_after_it_was_left(driver: Driver) -> None:
    driver.do("allocate", [1], "a")
    driver.do("seal", [1], [70])
    (work,) = driver.work()
    driver.do("reopen", [1])
    driver.apply()
    assert work.generations.tolist() == [1]


# The caller's arrays


@pytest.mark.parametrize(
    "event", ["allocate", "write", "seal", "claim", "reopen", "adopt", "release", "free", "forget"]
)
def test_pages_are_copied(driver: Driver, event: str) -> None:
    changed, untouched = Driver(driver.kind), Driver(driver.kind)
    for other, change in ((changed, True), (untouched, False)):
        pages = driver.array([1, 2]) if driver.kind != "host" else np.array([1, 2])
        getattr(other.ledger, event)(pages)
        if change:
            pages[:] = 5
    assert changed.states() == untouched.states()
    assert changed.generations() == untouched.generations()
    assert [work.pages.tolist() for work in changed.work()] == [work.pages.tolist() for work in untouched.work()]
    assert [changed.row(page) for page in range(8)] == [untouched.row(page) for page in range(8)]


def test_identities_owners_and_counts_are_copied(driver: Driver) -> None:
    make: Any = np.array if driver.kind == "host" else partial(torch.tensor, device=driver.device)
    identities, owners, counts = make([70, 80]), make([11, 12]), make([2, 3])
    driver.ledger.adopt(driver.array([1, 2]), identities, owners, owners=counts)
    identities[:] = owners[:] = counts[:] = 9
    assert [(row.identity, row.owner, row.owners) for row in map(driver.row, (1, 2))] == [
        (70, "request#11", 2),
        (80, "request#12", 3),
    ]


def test_targets_and_sources_of_a_move_are_copied(driver: Driver) -> None:
    make: Any = np.array if driver.kind == "host" else partial(torch.tensor, device=driver.device)
    sources, targets = make([1]), make([2])
    sealed(driver)
    driver.ledger.move(sources, targets)
    sources[:] = targets[:] = 5
    (work,) = driver.work()
    assert (work.sources.tolist(), work.pages.tolist()) == ([1], [2])
    assert driver.row(2).state == SEALED


def test_pages_may_be_any_integer_array(driver: Driver) -> None:
    array = driver.array([1]).to(torch.int32) if driver.kind != "host" else np.array([1], np.int32)
    for pages in ([1], (1,), range(1, 2), array):
        driver.ledger.allocate(pages, "a")
        driver.ledger.release(pages, "a")
    assert (driver.generations()[1], driver.wrong()) == (4, set())


def test_owners_may_be_an_array_of_handles(driver: Driver) -> None:
    driver.do("allocate", [1, 2], [11, 12])
    driver.do("write", [1, 2], [11, 13])
    assert driver.wrong() == {(Reason.WRITE_TO_FOREIGN, 2)}
    assert [driver.row(page).owner for page in (1, 2)] == ["request#11", "request#12"]


def test_owners_may_be_a_list_of_names_where_pages_are_host_integers(host: Driver) -> None:
    host.ledger.adopt([1, 2, 3], [70, 80, 90], ["a", "b", ""])
    assert [host.row(page).owner for page in (1, 2, 3)] == ["a", "b", None]


# The host ledger: recorded now, replayed later


def test_generations_are_raised_on_the_engine_s_side_before_anything_is_replayed(host: Driver) -> None:
    host.do("allocate", [1], "a")
    host.do("reopen", [2])
    host.do("forget", [3])
    assert host.generations() == [0, 1, 1, 1, 0, 0, 0, 0]
    assert host.ledger.live_generations.tolist() == host.generations()
    host.do("reset")
    assert host.generations() == [1, 2, 2, 2, 1, 1, 1, 1]
    assert host.ledger.states(0, 8).tolist() == [UNKNOWN] * 8


def test_events_wait_for_catch_up(host: Driver) -> None:
    host.do("allocate", [1], "a")
    assert host.ledger.states(0, 8).tolist() == [UNKNOWN] * 8
    assert host.ledger.catch_up(seconds=1)
    assert host.ledger.states(1, 2).tolist() == [OPEN]


def test_catch_up_stops_when_its_time_is_over_and_says_that_more_is_left(host: Driver) -> None:
    for page in (1, 2):
        host.do("allocate", [page], "a")
    assert [host.ledger.catch_up(seconds=0), host.ledger.catch_up(seconds=0)] == [False, True]


def test_live_generations_are_the_column_itself(driver: Driver) -> None:
    """An exchange of a byte compares them under the GIL: a copy would be blind."""
    if driver.device.type != "cpu":
        pytest.skip("bytes in device memory are not exchanged under the GIL")
    live = driver.ledger.live_generations
    driver.do("allocate", [1], "a")
    assert live[1] == 1


def full(maximum: int = 3) -> Driver:
    driver = Driver("host", maximum_pending_events=maximum)
    for page in range(maximum + 1):
        driver.do("allocate", [page], "a")
    return driver


def test_events_that_nobody_replays_are_dropped_and_set_overrun() -> None:
    driver = Driver("host", maximum_pending_events=3)
    for page in range(3):
        driver.do("allocate", [page], "a")
        assert not driver.ledger.overrun
    driver.do("allocate", [3], "a")
    assert driver.ledger.overrun
    assert driver.states() == [OPEN] * 3 + [UNKNOWN] * 5


def test_generations_are_raised_through_an_overrun() -> None:
    assert full().generations() == [1, 1, 1, 1, 0, 0, 0, 0]


def test_after_an_overrun_nothing_is_judged_without_the_events_that_were_lost() -> None:
    """Until the reset: an event whose past is missing would look wrong."""
    driver = full()
    driver.do("release", [0], "a")  # lost
    driver.do("free", [0])  # lost
    driver.apply()
    driver.do("allocate", [0], "b")
    assert driver.wrong() == set()
    assert driver.ledger.overrun


def test_reset_clears_an_overrun_and_what_follows_counts_again() -> None:
    driver = full()
    driver.do("step")  # lost
    driver.do("reset")
    assert not driver.ledger.overrun
    driver.do("allocate", [1], "b")
    row = driver.row(1)
    assert (row.state, row.generation, row.owner) == (OPEN, 3, "b")
    assert driver.apply().engine_step == 2


@pytest.mark.parametrize("kind", ["tensor", "kernel"])
def test_a_tensor_ledger_has_nothing_pending_and_no_overrun(kind: str) -> None:
    driver = Driver(kind)
    driver.do("allocate", [1], "a")
    assert driver.ledger.catch_up(seconds=0)
    assert not driver.ledger.overrun


@pytest.mark.parametrize("kind", KINDS)
def test_nbytes_grows_with_the_pages(kind: str) -> None:
    small, big = Driver(kind, pages=1000), Driver(kind, pages=2000)
    assert 1000 * 30 < small.ledger.nbytes < big.ledger.nbytes < 2.1 * small.ledger.nbytes


def test_the_row_of_a_replaced_page_waits_until_the_replay_has_come_so_far(host: Driver) -> None:
    """The replayed generation is behind the live one: whoever compares them leaves the page alone."""
    sealed(host).do("allocate", [1], "b")
    assert (host.ledger.row(1).generation, host.generations()[1]) == (1, 2)
    assert host.row(1).generation == 2


# Names of owners


def test_a_name_keeps_its_handle() -> None:
    names = OwnerNames()
    handle = names.handle("a")
    assert names.handle("b") != handle
    assert names.handle("a") == handle
    assert names.name(handle) == "a"


def test_no_name_is_nobody() -> None:
    names = OwnerNames()
    assert (names.handle(""), names.handle(0), names.name(0)) == (0, 0, None)


def test_a_handle_is_taken_as_it_is() -> None:
    names = OwnerNames()
    assert (names.handle(41), names.handle(np.int64(42)), names.name(42)) == (41, 42, "request#42")


def test_the_name_used_longest_ago_is_forgotten() -> None:
    names = OwnerNames(capacity=2)
    a, b = names.handle("a"), names.handle("b")
    names.handle("a")
    c = names.handle("c")
    assert [names.name(handle) for handle in (a, b, c)] == ["a", f"request#{b}", "c"]


def test_a_forgotten_name_gets_a_new_handle_and_never_another_s() -> None:
    names = OwnerNames(capacity=2)
    handles = [names.handle(name) for name in ("a", "b", "c", "a", "d", "b")]
    assert len(set(handles)) == 6


def test_a_request_that_lives_long_does_not_become_a_stranger_to_its_own_page(driver: Driver) -> None:
    driver.ledger._names = OwnerNames(capacity=4)  # type: ignore[attr-defined]
    driver.do("allocate", [1], "old")
    for number in range(20):
        driver.do("write", [1], "old")
        driver.do("allocate", [2], f"r{number}")
        driver.do("release", [2], f"r{number}")
    assert driver.wrong() == set()


def test_the_ledger_names_an_owner_by_its_handle(driver: Driver) -> None:
    driver.do("allocate", [1], "a")
    driver.do("allocate", [1], "b")
    (violation,) = driver.violations()
    assert [driver.ledger.owner_name(handle) for handle in (violation.owner, 0, 12345)] == ["b", None, "request#12345"]


def test_a_host_ledger_holds_no_more_events_than_it_was_given() -> None:
    ledger = HostLedger("full", 8, maximum_pending_events=5)
    for _ in range(50):
        ledger.step()
    assert len(ledger._events) == 5
