"""Pressure: a pool so small that eviction never stops. Silent for as long as it runs, and in a second run every fault
is found.

Short here; `PRESSURE_SECONDS=600 pytest -m engines tests/engines/test_transformers_pressure.py -s` is the ten-minute
form.
"""

from __future__ import annotations

import os
import random
import time

import numpy as np
import pytest

from builders.transformers_engine import guarded_engine, make_settings, paused, real_incidents, wait_until
from kv_canary import Budget
from kv_canary_transformers.demo.traffic import Traffic

pytestmark = pytest.mark.engines

SECONDS = float(os.environ.get("PRESSURE_SECONDS", "20"))
PAGES = 64


@pytest.mark.timeout(SECONDS + 300)
def test_pressure_raises_nothing() -> None:
    """At the default budget of 1%."""
    with guarded_engine(pages=PAGES, settings=make_settings(budget=Budget(share=0.01))) as (manager, sidecar):
        traffic = Traffic(manager, pages=PAGES, seed=11)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            traffic.pump()
        snapshot = sidecar.settle()
    seen = snapshot.groups[0].counters
    print(
        f"\n{seen.verified_pages:,} verifications in {SECONDS:.0f} s, {seen.superseded} superseded, "
        f"{seen.sealed_pages:,} sealed, {seen.claims:,} claims, {traffic.requests_finished:,} requests"
    )
    assert real_incidents(snapshot) == []
    assert snapshot.errors == {}
    assert seen.claims_not_covered == 0
    assert seen.sealed_pages > 20 * SECONDS
    assert seen.verified_pages > 500 * SECONDS


@pytest.mark.timeout(SECONDS + 300)
def test_every_fault_injected_under_pressure_is_found() -> None:
    """One bit a time, in any layer of a sealed or free page, between two steps; traffic goes on until the next one."""
    source = random.Random(12)
    with guarded_engine(pages=PAGES, settings=make_settings(budget=Budget(share=0.01))) as (manager, sidecar):
        traffic = Traffic(manager, pages=PAGES, seed=12)
        end = time.monotonic() + SECONDS
        injected, seconds, spoiled = 0, [], {}
        while time.monotonic() < end or injected < 10:
            finished = traffic.requests_finished
            wait_until(lambda n=finished: traffic.pump() or traffic.requests_finished > n + 3, 60)
            with paused(manager):
                sidecar.settle()
                blocks = manager.batch_processor.cache.cache_allocators["full_attention"]._copy_view
                pages = sidecar._canary._guards[0].verifier.select(0, len(blocks)).tolist()
                page = source.choice([page for page in pages if spoiled.get(page) != generation(sidecar, page)])
                spoiled[page] = generation(sidecar, page)
                blocks[page, source.randrange(blocks.shape[1])] ^= 1 << source.randrange(8)
                injected, started = injected + 1, time.monotonic()
                wait_until(lambda n=injected: sidecar.snapshot().incidents_total == n, 10)
                seconds.append(time.monotonic() - started)
                incident = real_incidents(sidecar.snapshot())[-1]
                assert (incident.page, incident.persistence) == (page, "persistent")
        snapshot = sidecar.settle()
    print(f"\n{injected} faults injected and found, the slowest in {max(seconds):.2f} s")
    assert snapshot.errors == {}
    assert snapshot.incidents_total == injected


def generation(sidecar, page: int) -> int:
    return int(sidecar._canary._guards[0].ledger.generations(np.array([page]))[0])
