"""Drills find what they inject, put it back, and are loud when they do not."""

from __future__ import annotations

import random

import numpy as np
import pytest

from builders.harness import Harness
from kv_canary.drills import ATTEMPTS, Drills
from kv_canary.errors import ConflictError, ForbiddenError
from kv_canary.fingerprint.table import Differences
from kv_canary.snapshot import Drill


def make_drills(harness: Harness) -> Drills:
    return Drills(
        [harness.guard], monotonic=harness.clock.monotonic, time=harness.clock.time, random_source=random.Random(0)
    )


def request(drills: Drills, kind: str = "fingerprint", **changes) -> Drill:
    return drills.request(kind, None, **{"automatic": False, "alert": False, "content_allowed": True, **changes})


def run(drills: Drills) -> list[int]:
    """Runs pending drills; returns the pages of the incidents asked for."""
    pages: list[int] = []
    drills.run(lambda guard, finding, drill: pages.append(finding.page) or "inc-1")
    return pages


@pytest.mark.parametrize("kind", ["fingerprint", "content"])
@pytest.mark.parametrize("seed", range(5))
def test_a_drill_is_detected_and_leaves_no_trace(kind: str, seed: int) -> None:
    harness = Harness()
    harness.sealed(*range(0, 32, 2))
    before = harness.memory.clone()
    expected = harness.verifier.table.expected(np.arange(32)).copy()
    drills = make_drills(harness)
    drills._random.seed(seed)
    request(drills, kind)
    (page,) = run(drills)
    (drill,) = drills.published()
    assert (drill.result, drill.page, drill.incident) == ("detected", page, "inc-1")
    assert (harness.memory == before).all()
    assert (harness.verifier.table.expected(np.arange(32)) == expected).all()
    assert harness.sweep() == []
    assert drills.totals[(kind, "detected")] == 1


def test_a_verifier_that_stopped_working_is_a_missed_drill() -> None:
    harness = Harness()
    harness.sealed(1)
    nothing = np.empty(0, np.int64)
    harness.verifier.table.verify = lambda pages: Differences(
        rows=nothing, stripes=nothing, found=nothing.astype(np.uint64)
    )
    drills = make_drills(harness)
    request(drills)
    assert run(drills) == []
    assert drills.published()[0].result == "missed"
    assert drills.totals[("fingerprint", "missed")] == 1


def test_a_page_recycled_under_the_drill_is_tried_again_and_then_given_up() -> None:
    harness = Harness()
    harness.sealed(1)
    verify = harness.verifier.verify

    def recycling(pages, purpose):
        harness.ledger.allocate(pages, "b")
        result = verify(pages, purpose)
        harness.ledger.seal(pages)
        harness.apply()
        return result

    harness.verifier.verify = recycling
    drills = make_drills(harness)
    request(drills)
    for _ in range(ATTEMPTS + 1):
        run(drills)
    assert drills.published()[0].result == "superseded"
    assert not drills.pending


def test_a_content_drill_never_writes_into_a_page_that_was_recycled() -> None:
    """The engine takes the page while the drill reads it: the byte is left to the new owner."""
    harness = Harness()
    harness.sealed(1)
    verify = harness.verifier.verify

    def recycling(pages, purpose):
        findings = verify(pages, purpose)
        harness.ledger.allocate(pages, "b")
        harness.memory[1] = 0
        return findings

    harness.verifier.verify = recycling
    drills = make_drills(harness)
    request(drills, "content")
    run(drills)
    assert not harness.memory[1].any()
    assert "recycled" in drills.published()[0].detail


def test_content_drills_must_be_allowed() -> None:
    harness = Harness()
    harness.sealed(1)
    with pytest.raises(ForbiddenError, match="KV_CANARY_ALLOW_CONTENT_DRILLS"):
        request(make_drills(harness), "content", content_allowed=False)


def test_a_content_drill_prefers_pages_that_nobody_holds() -> None:
    harness = Harness()
    harness.sealed(*range(32))
    harness.ledger.release([9], "a")
    harness.apply()
    drills = make_drills(harness)
    for _ in range(5):
        request(drills, "content")
        assert run(drills) == [9]


def test_no_drill_while_the_group_is_off() -> None:
    harness = Harness()
    harness.guard.enabled = False
    with pytest.raises(ConflictError):
        request(make_drills(harness))


def test_a_drill_waits_for_a_page_and_gives_up_in_the_end() -> None:
    harness = Harness()
    drills = make_drills(harness)
    request(drills)
    run(drills)
    assert drills.published()[0].result == "running"
    harness.clock.now += 60
    run(drills)
    assert drills.published()[0].result == "superseded"


def test_a_real_fault_on_the_drilled_page_does_not_hide_behind_the_drill() -> None:
    harness = Harness()
    harness.sealed(1)
    harness.flip(1, 5000)
    drills = make_drills(harness)
    request(drills)
    run(drills)
    (finding,) = harness.sweep()
    assert finding.stripes == (1,)
