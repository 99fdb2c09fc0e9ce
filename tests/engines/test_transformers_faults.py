"""The catalogue on a real continuous-batching engine, and its CPU swap pool as a tier."""

from __future__ import annotations

from typing import Any

import pytest

from builders.transformers_engine import paused, real_incidents, wait_until
from kv_canary.faults.results import FaultRequest, Result
from kv_canary_transformers.demo.engine import build_model
from kv_canary_transformers.faults import CONTROLS, FAULTS, Guarded, _without_pinned_memory, run
from kv_canary_transformers.offload import OffloadRecorder

pytestmark = pytest.mark.engines


def results_of(name: str) -> Result:
    results: list[Result] = []
    run(FaultRequest(seed=1, wanted=lambda one: one == name, each=results.append))
    (result,) = results
    return result


@pytest.mark.parametrize("name", [fault.name for fault in FAULTS])
def test_a_fault_is_caught_by_the_check_that_the_catalogue_names(name: str) -> None:
    result = results_of(name)
    assert result.passed, result
    assert result.caught
    assert result.seconds is not None
    assert result.seconds < 5


@pytest.mark.parametrize("name", [control.name for control in CONTROLS])
def test_a_healthy_engine_raises_nothing(name: str) -> None:
    result = results_of(name)
    assert result.passed, result


def squeezed(engine: Guarded, requests: int = 12) -> None:
    """More than fits: some requests have to wait in the swap pool."""
    prompts = [[3 + (index * 31 + place * 7) % 400 for place in range(60)] for index in range(requests)]
    engine.generate(prompts, new_tokens=80)


def test_blocks_that_come_back_are_verified_and_sealed_with_their_tokens() -> None:
    engine = Guarded(build_model(), pages=24, offload=True)
    try:
        squeezed(engine)
        assert engine.sidecar is not None
        snapshot = engine.sidecar.settle()
        assert snapshot.groups[0].counters.transfers["verified"] > 10
        assert snapshot.groups[0].counters.transfers["mismatch"] == 0
        assert real_incidents(snapshot) == []
        assert snapshot.errors == {}
        assert [one.name for one in snapshot.uncovered] == ["cpu swap pool"]
        assert "open block" in snapshot.uncovered[0].reason
        assert engine.manager.batch_processor.offloading_manager._request_id_to_cpu_blocks == {}
        space = engine.manager.batch_processor.offloading_manager
        assert "_offload_to_cpu" in vars(space)
        engine.sidecar.detach()
        assert not {name for name, value in vars(space).items() if callable(value)}
    finally:
        engine.close()


def test_a_cancelled_request_leaves_no_manifest_behind() -> None:
    engine = Guarded(build_model(), pages=24, offload=True)
    try:
        space = None

        def offloaded() -> list[str]:
            nonlocal space
            space = engine.manager.batch_processor.offloading_manager
            return list(space._request_id_to_cpu_blocks)

        engine.generate([[5] * 40])
        for index in range(12):
            tokens = [3 + (index * 31 + place * 7) % 400 for place in range(60)]
            engine.manager.add_request(tokens, request_id=f"big{index}", max_new_tokens=200)
        wait_until(offloaded, 60)
        for index in range(12):
            engine.manager.cancel_request(f"big{index}")
        wait_until(lambda: not offloaded(), 60)
        with paused(engine.manager):
            pass
        assert engine.sidecar is not None
        assert real_incidents(engine.sidecar.settle()) == []
    finally:
        engine.close()


def test_an_offloading_manager_of_another_shape_is_left_alone_and_listed() -> None:
    class Other:
        _cpu_pool = object()

        def _offload_to_cpu(self, renamed: Any) -> None: ...

    assert OffloadRecorder.has_pool(Other())
    assert not OffloadRecorder.is_modelled(Other())


def test_the_stand_in_for_pinned_memory_is_taken_away_again() -> None:
    from transformers.generation.continuous_batching import offloading_manager

    before = offloading_manager.torch
    _without_pinned_memory()()
    assert offloading_manager.torch is before
