"""On the harness, by several seeds: every fault of the catalogue is caught as it should be, every control is silent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_canary.faults.catalogue import FAULTS, Fault
from kv_canary.faults.controls import CONTROLS, Control
from kv_canary.faults.program import run_control, run_fault
from kv_canary.faults.stage import Stage

SEEDS = (0, 1, 2)
NUMBERS = {f"F{number}" for number in range(1, 14)}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught_by_the_check_that_the_catalogue_names(fault: Fault, seed: int) -> None:
    result = run_fault(fault, seed)
    assert result.passed, result
    assert result.caught
    assert result.check in fault.checks
    assert result.seconds is not None
    assert result.seconds < 5


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_a_healthy_engine_raises_nothing(control: Control, seed: int) -> None:
    assert run_control(control, seed).passed, run_control(control, seed)


def test_all_thirteen_are_there() -> None:
    assert {fault.name.split()[0] for fault in FAULTS} == NUMBERS
    names = [one.name for one in (*FAULTS, *CONTROLS)]
    assert len(names) == len(set(names))


def test_the_same_seed_gives_the_same_result() -> None:
    for fault in (FAULTS[0], FAULTS[-1]):
        one, other = (replace(run_fault(fault, 5), seconds=None) for _ in range(2))
        assert one == other


def test_a_fault_that_does_nothing_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are no foregone conclusion."""
    monkeypatch.setattr(Stage, "until", lambda self, condition, seconds=5.0: condition())
    fault = replace(FAULTS[0], inject=lambda stage: {1, 2, 3})
    result = run_fault(fault, 0)
    assert (result.caught, result.passed) == (False, False)


def test_an_alarm_about_another_page_is_a_false_one() -> None:
    spoiled = next(fault for fault in FAULTS if fault.name == "F13 burst")

    def inject(stage: Stage) -> set[int]:
        pages = spoiled.inject(stage)
        stage.engine.pool.bytes[stage.engine.free[-1]] ^= 1
        return pages

    result = run_fault(replace(spoiled, inject=inject), 0)
    assert (result.caught, result.false_alarms, result.passed) == (True, 1, False)


def test_another_cause_than_the_catalogue_s_is_a_problem() -> None:
    fault = replace(next(fault for fault in FAULTS if fault.name == "F13 bit"), cause="cosmic rays")
    result = run_fault(fault, 0)
    assert result.caught
    assert "cosmic rays" in result.problem
    assert not result.passed


def test_a_control_that_breaks_the_rules_is_not_silent() -> None:
    def rude(stage: Stage) -> None:
        stage.settle()
        stage.engine.pool.bytes[5] ^= 0x55

    result = run_control(Control(name="C0", title="a writer that asks nobody", run=rude), 0)
    assert result.false_alarms == 1
    assert not result.passed
