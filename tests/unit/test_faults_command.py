"""`kv-canary faults`: its arguments, its table, its document, and its exit status."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from kv_canary.cli.program import run
from kv_canary.cli.session import Surroundings
from kv_canary.faults import program
from kv_canary.faults.results import FaultRequest, Result


def make_result(name: str = "F7", **overrides: Any) -> Result:
    values: dict[str, Any] = {
        "fault": name,
        "title": "double free",
        "engine": "harness",
        "expected": ("ownership",),
        "caught": True,
        "check": "ownership",
        "persistence": "persistent",
        "cause_guess": "two owners",
        "seconds": 0.0125,
        "false_alarms": 0,
    }
    return Result(**values | overrides)


def silent(name: str = "C1") -> Result:
    nothing = dict.fromkeys(("caught", "check", "persistence", "cause_guess", "seconds"))
    return make_result(name, title="recycling", expected=(), **nothing)


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """What the harness is made to say."""
    given: list[Result] = []

    def fake(request: FaultRequest) -> None:
        for result in given:
            if request.wanted(result.fault):
                request.begin(result.fault)
                request.each(result)

    monkeypatch.setattr(program, "_run_harness", fake)
    return given


def call(*arguments: str) -> tuple[int, str, str]:
    stdout, stderr = io.StringIO(), io.StringIO()
    status = run(["faults", *arguments], Surroundings(stdout=stdout, stderr=stderr, environment={}))
    return status, stdout.getvalue(), stderr.getvalue()


def test_all_caught_and_silent_is_0(results: list[Result]) -> None:
    results += [make_result(), silent()]
    status, out, err = call()
    assert (status, err) == (0, "")
    assert "F7     caught  ownership  persistent" in " ".join(out.splitlines()[1:2])
    assert "1 of 1 faults caught, 1 of 1 controls silent; engine harness, seed 0" in out.splitlines()[-1]


@pytest.mark.parametrize(
    "bad",
    [
        make_result(caught=False, check=None, persistence=None, cause_guess=None, seconds=None),
        make_result(false_alarms=1),
        make_result(problem="the cause is to say more"),
        make_result("C1", caught=None, false_alarms=2),
    ],
)
def test_anything_else_is_1_and_says_what(results: list[Result], bad: Result) -> None:
    results += [bad]
    status, out, _ = call()
    assert status == 1
    assert out.splitlines()[-1].startswith("BAD")
    if bad.problem:
        assert f"{bad.fault}: {bad.problem}" in out


def test_the_document_has_a_row_a_fault(results: list[Result]) -> None:
    results += [make_result(), silent()]
    status, out, _ = call("--json", "--seed", "3")
    document = json.loads(out)
    assert status == 0
    assert (document["engine"], document["seed"], document["passed"]) == ("harness", 3, True)
    row = document["results"][0]
    wanted = {"fault", "engine", "caught", "check", "persistence", "cause_guess", "seconds", "false_alarms"}
    assert wanted <= row.keys()
    assert (row["fault"], row["caught"], row["seconds"]) == ("F7", True, 0.0125)
    assert document["results"][1]["caught"] is None


def test_only_takes_a_number_and_all_that_belongs_to_it(results: list[Result]) -> None:
    results += [make_result("F1"), make_result("F13 bit"), make_result("F13 rows"), silent()]
    _, out, _ = call("--json", "--only", "F13", "--only", "C1")
    assert [row["fault"] for row in json.loads(out)["results"]] == ["F13 bit", "F13 rows", "C1"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--only", "F99"), "nothing by the name of F99"),
        (("--engine", "abacus"), "no faults for engine 'abacus'; there are: harness"),
        (("--seed", "-1"), "--seed"),
        (("--seed", "x"), "--seed"),
        (("--sweep",), "--sweep"),
    ],
)
def test_wrong_use_is_2_in_a_line_or_two(results: list[Result], arguments: tuple[str, ...], text: str) -> None:
    results += [make_result()]
    status, out, err = call(*arguments)
    assert status == 2
    assert out == ""
    assert text in err
    assert "Traceback" not in err


def test_the_real_harness_runs_one_fault() -> None:
    status, out, _ = call("--json", "--only", "F7")
    assert status == 0
    (row,) = json.loads(out)["results"]
    assert (row["caught"], row["check"], row["cause_guess"]) == (True, "ownership", "two owners")
