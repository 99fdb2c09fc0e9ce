"""The API under requests that nobody would think of, made up from its own OpenAPI document.

`KV_CANARY_FUZZ_CASES=20000` makes the short form a long one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from builders.fuzzing import fuzz
from builders.guarded_pool import guarded_pool

CASES = int(os.environ.get("KV_CANARY_FUZZ_CASES", "0"))


@pytest.mark.timeout(7200 if CASES else 300)
def test_no_request_leads_to_a_server_error_or_to_an_answer_that_is_not_documented(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, record_property: pytest.RecordProperty
) -> None:
    """And the canary beside it goes on: no false alarm, nothing failed, the API still answers."""
    cases, seed = 0, 0
    with guarded_pool(served=True) as (sidecar, _):
        url = sidecar.settle().url
        assert url is not None
        while not seed or cases < CASES:
            long = (
                {"examples": 300, "phases": "fuzzing"}
                if seed
                else {"examples": 20, "phases": "coverage,fuzzing,stateful"}
            )
            fuzzed = fuzz(url, tmp_path, seed=seed, **long)
            assert not fuzzed.failures, fuzzed.failures
            cases, seed = cases + fuzzed.cases, seed + 1
        snapshot = sidecar.settle()
    print(f"\n{cases} requests made up, none led to a server error or to an answer that is not documented")
    record_property("requests", cases)
    assert cases > 300
    assert [incident for incident in snapshot.incidents if incident.source == "real"] == []
    assert snapshot.errors == {}
    assert [record.getMessage() for record in caplog.records if record.name == "kv_canary.http"] == []
