"""The soak counts what it says it counts: nothing from an engine that obeys, and it fails for one that does not."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout

import pytest

from kv_canary.faults import soak as program
from kv_canary.faults.rig import HarnessRig
from kv_canary.faults.soak import soak

SECONDS = 6.0


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "FAULT_SECONDS", 0.3)
    monkeypatch.setattr(program, "TOGGLE_SECONDS", 2.0)


def small(seed: int) -> HarnessRig:
    return HarnessRig(seed, pages=256, requests=12)


def test_an_engine_that_obeys_is_silent_and_every_fault_is_found() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        status = program.main(["--seconds", str(SECONDS), "--seed", "3"], small)
    document = json.loads(stdout.getvalue())
    assert (status, document["passed"]) == (0, True), document
    assert document["alarms"] == 0
    assert document["faults_found"] == document["faults_injected"] > 3
    assert document["verified_pages"] > 10_000
    assert document["superseded"] > 0
    assert document["switched_off_and_on"] >= 1
    assert document["transfers"]["verified"] > 0
    assert document["worst_detection_seconds"] < 5
    assert "pages verified" in stderr.getvalue()


def test_an_engine_that_does_not_obey_fails_it() -> None:
    rig = small(4)
    step = rig.engine.step

    def rude(**options: int) -> None:
        step(**options)
        if rig.engine.gate.steps % 10 == 0 and rig.engine.gate.recording and rig.engine.free:
            rig.sidecar.settle()
            rig.engine.pool.bytes[rig.engine.free[0]] ^= 0x55

    rig.engine.step = rude  # type: ignore[method-assign]
    try:
        document = soak(rig, SECONDS)
    finally:
        rig.sidecar.stop()
    assert document["alarms"] > 0
    assert not document["passed"]


def test_a_fault_that_is_not_found_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "DETECTION_SECONDS", 0.2)
    rig = small(5)
    honest = rig.spoil

    def imagined(choose: object) -> object:
        spoiled = honest(choose)  # type: ignore[arg-type]
        if spoiled is not None:
            spoiled.mend()
        return spoiled

    rig.spoil = imagined  # type: ignore[method-assign, assignment]
    try:
        document = soak(rig, SECONDS)
    finally:
        rig.sidecar.stop()
    assert document["faults_found"] < document["faults_injected"]
    assert not document["passed"]


def test_an_engine_that_dies_is_not_a_soak_that_passed() -> None:
    rig = small(6)
    rig.engine.step = lambda **options: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        soak(rig, 1.0)
    rig.sidecar.stop()
