"""The token bucket never lets more than its rate through, and never stands still without a reason."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_canary.budget import BURST_SECONDS, TokenBucket


def test_the_first_launch_is_due_at_once() -> None:
    assert TokenBucket(100.0, now=5.0).delay(5.0) == 0


def test_a_launch_may_overdraw_and_the_next_one_waits_for_it() -> None:
    bucket = TokenBucket(100.0, now=0.0)
    bucket.spend(300)
    assert bucket.delay(0.0) == 3.0
    assert bucket.delay(1.0) == 2.0
    assert bucket.delay(3.0) == 0


def test_looking_twice_does_not_fill_twice() -> None:
    bucket = TokenBucket(100.0, now=0.0)
    bucket.spend(300)
    for _ in range(10):
        bucket.delay(1.0)
    assert bucket.delay(1.0) == 2.0


def test_a_long_pause_saves_up_no_more_than_a_quarter_of_a_second() -> None:
    bucket = TokenBucket(100.0, now=0.0)
    assert bucket.delay(3600.0) == 0
    bucket.spend(125)
    assert bucket.delay(3600.0) == pytest.approx(1.25 - BURST_SECONDS)


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_without_a_rate_no_launch_is_ever_due(rate: float) -> None:
    assert TokenBucket(rate, now=0.0).delay(1e9) == math.inf


def test_a_clock_that_jumps_back_neither_fills_nor_drains() -> None:
    bucket = TokenBucket(100.0, now=100.0)
    bucket.spend(300)
    assert bucket.delay(0.0) == 3.0
    assert bucket.delay(1.0) == 2.0


def test_a_new_rate_counts_from_now_on() -> None:
    bucket = TokenBucket(100.0, now=0.0)
    bucket.spend(300)
    bucket.set_rate(1000.0, now=1.0)
    assert bucket.delay(1.0) == pytest.approx(0.2)


def test_the_time_without_a_rate_fills_nothing() -> None:
    bucket = TokenBucket(0.0, now=0.0)
    bucket.spend(100)
    bucket.set_rate(100.0, now=50.0)
    assert bucket.delay(50.0) == pytest.approx(1.0)


@settings(max_examples=200, deadline=None)
@given(
    rate=st.floats(1.0, 1e12),
    launches=st.lists(st.tuples(st.integers(1, 10**9), st.floats(0.0, 10.0)), min_size=1, max_size=30),
)
def test_on_average_no_more_than_the_rate_is_read(rate: float, launches: list[tuple[int, float]]) -> None:
    """Whatever the launches' sizes and the pauses between them: rate x time, the burst and one launch."""
    bucket, now, total = TokenBucket(rate, now=0.0), 0.0, 0
    for size, pause in launches:
        now += pause + bucket.delay(now + pause)
        total += size
        bucket.spend(size)
        assert total <= (rate * (now + BURST_SECONDS) + size) * (1 + 1e-9)
