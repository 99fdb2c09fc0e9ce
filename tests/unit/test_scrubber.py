"""Sweep order, pace and requests. Time stands still until the test moves it."""

from __future__ import annotations

import numpy as np

from builders.harness import Harness, make_memory
from kv_canary.scrubber import EMPTY_PASS_SECONDS, REQUESTED_SHARE, Scrubber
from kv_canary.settings import Budget

PAGE = 8192


def make_scrubber(*harnesses: Harness, budget: Budget | None = None, bandwidth: float = 2 * PAGE * 1000) -> Scrubber:
    """A launch reads four pages; the default budget reads 100 pages a second."""
    clock = harnesses[0].clock
    return Scrubber(
        [harness.guard for harness in harnesses],
        budget=budget or Budget(bytes_per_second=100 * PAGE),
        read_bandwidth=bandwidth,
        monotonic=clock.monotonic,
        time=clock.time,
    )


def record_order(harness: Harness) -> list[int]:
    """Every page number that is verified, in order."""
    order: list[int] = []
    verify = harness.verifier.verify

    def recording(pages, purpose):
        order.extend(pages.tolist())
        return verify(pages, purpose)

    harness.verifier.verify = recording  # type: ignore[method-assign]
    return order


def run(scrubber: Scrubber, clock, seconds: float) -> int:
    """Advances whenever something is due; returns the bytes read."""
    end, size = clock.now + seconds, 0
    while clock.now < end:
        size += scrubber.advance(lambda guard, finding: True)
        clock.now += min(max(scrubber.delay(), 1e-4), end - clock.now + 1e-9)
    return size


def test_pages_are_verified_in_address_order_round_and_round() -> None:
    harness = Harness()
    harness.sealed(*range(32))
    order = record_order(harness)
    run(make_scrubber(harness), harness.clock, 1.0)
    assert order[:96] == [*range(32)] * 3


def test_pages_that_cannot_be_verified_are_passed_over() -> None:
    harness = Harness()
    harness.sealed(3, 17, 30)
    order = record_order(harness)
    run(make_scrubber(harness), harness.clock, 0.1)
    assert order[:6] == [3, 17, 30] * 2


def test_no_more_is_read_than_the_budget_allows() -> None:
    """Over ten seconds: the rate, give or take one launch and the burst."""
    harness = Harness()
    harness.sealed(*range(32))
    size = run(make_scrubber(harness), harness.clock, 10.0)
    assert 0.95 * 1000 * PAGE <= size <= 1000 * PAGE + 25 * PAGE + 4 * PAGE


def test_budget_off_sweeps_nothing_in_the_background() -> None:
    harness = Harness()
    harness.sealed(*range(32))
    assert run(make_scrubber(harness, budget=Budget()), harness.clock, 5.0) == 0


def test_a_requested_sweep_runs_although_the_budget_is_off() -> None:
    harness = Harness()
    harness.sealed(*range(32))
    scrubber = make_scrubber(harness, budget=Budget())
    scrubber.request("s", [harness.guard])
    run(scrubber, harness.clock, 32 / (2000 * REQUESTED_SHARE) + 1)
    request = scrubber.requests["s"]
    assert (request.state, request.verified_pages, request.scanned_pages, request.progress) == ("finished", 32, 32, 1.0)


def test_a_requested_sweep_comes_before_the_background_and_counts_mismatches() -> None:
    harness = Harness()
    harness.sealed(*range(32))
    scrubber = make_scrubber(harness)
    run(scrubber, harness.clock, 0.1)
    harness.flip(20)
    scrubber.request("s", [harness.guard])
    order = record_order(harness)
    run(scrubber, harness.clock, 0.5)
    assert order[:32] == [*range(32)]
    assert scrubber.requests["s"].mismatches == 1


def test_an_interrupted_sweep_says_so() -> None:
    harness = Harness()
    harness.sealed(*range(32))
    scrubber = make_scrubber(harness)
    scrubber.request("s", [harness.guard])
    scrubber.advance(lambda guard, finding: True)
    scrubber.interrupt()
    assert scrubber.requests["s"].state == "interrupted"
    assert harness.verifier.counters.sweeps["interrupted"] == 1


def test_a_pause_keeps_the_position() -> None:
    harness = Harness()
    harness.sealed(*range(32))
    scrubber = make_scrubber(harness)
    order = record_order(harness)
    run(scrubber, harness.clock, 0.2)
    harness.guard.enabled = False
    done = len(order)
    run(scrubber, harness.clock, 1.0)
    assert len(order) == done
    harness.guard.enabled = True
    run(scrubber, harness.clock, 0.1)
    assert order[done] == (order[done - 1] + 1) % 32


def test_groups_take_turns() -> None:
    first, second = Harness(), Harness(memory=make_memory(seed=1))
    second.clock = first.clock
    for harness in (first, second):
        harness.sealed(*range(32))
    one, two = record_order(first), record_order(second)
    run(make_scrubber(first, second), first.clock, 2.0)
    assert min(len(one), len(two)) >= 64
    assert abs(len(one) - len(two)) <= 32


def test_a_pass_that_finds_nothing_waits_before_the_next_and_counts_as_none() -> None:
    harness = Harness()
    scrubber = make_scrubber(harness)
    scrubber.advance(lambda guard, finding: True)
    assert scrubber.delay() == EMPTY_PASS_SECONDS
    assert harness.verifier.counters.sweeps["clean"] == 0


def test_a_sweep_that_met_a_mismatch_counts_as_one() -> None:
    harness = Harness()
    harness.sealed(*range(32))
    harness.flip(4)
    run(make_scrubber(harness), harness.clock, 0.35)
    assert harness.verifier.counters.sweeps["mismatch"] == 1


def test_a_new_budget_takes_effect_at_once() -> None:
    harness = Harness()
    harness.sealed(*range(32))
    scrubber = make_scrubber(harness)
    run(scrubber, harness.clock, 1.0)
    scrubber.set_budget(Budget(bytes_per_second=1000 * PAGE), scrubber.read_bandwidth)
    size = run(scrubber, harness.clock, 1.0)
    assert size >= 900 * PAGE


def test_a_clock_that_jumps_back_neither_stalls_nor_floods() -> None:
    harness = Harness()
    harness.sealed(*range(32))
    scrubber = make_scrubber(harness)
    run(scrubber, harness.clock, 1.0)
    harness.clock.now -= 500
    size = run(scrubber, harness.clock, 2.0)
    assert 150 * PAGE <= size <= 250 * PAGE


def test_a_page_larger_than_a_launch_is_read_whole() -> None:
    harness = Harness()
    harness.sealed(*range(32))
    order = record_order(harness)
    run(make_scrubber(harness, bandwidth=10.0), harness.clock, 0.1)
    assert np.all(np.diff(order[:20]) == 1)
