"""Runs the catalogue and the controls. The reference harness is built in; other engines are found by name.

An entry point of the group `kv_canary.faults` is a function `run(request: FaultRequest) -> None` that produces on a
real engine what can be produced there, and tells each result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from kv_canary._version import __version__
from kv_canary.errors import KVCanaryError
from kv_canary.faults.results import FaultRequest, Result, attempted, judged

ENTRY_POINT_GROUP = "kv_canary.faults"
HARNESS = "harness"
AFTERWARDS_STEPS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`only` are names, or the beginnings of names up to a blank; none means all."""

    engine: str = HARNESS
    seed: int = 0
    only: tuple[str, ...] = ()

    def wants(self, name: str) -> bool:
        return not self.only or any(name == one or name.startswith(one + " ") for one in self.only)


def run(
    options: Options,
    *,
    begin: Callable[[str], None] = lambda name: None,
    each: Callable[[Result], None] = lambda one: None,
) -> dict[str, Any]:
    """The whole run as a document. Raises `KVCanaryError` for an engine or a fault that does not exist."""
    results: list[Result] = []

    def take(result: Result) -> None:
        results.append(result)
        each(result)

    request = FaultRequest(seed=options.seed, wanted=options.wants, begin=begin, each=take)
    engine = _run_harness if options.engine == HARNESS else _find_engine(options.engine)
    with _quiet():
        engine(request)
    if not results:
        raise KVCanaryError(
            f"--only: engine {options.engine} has nothing by the name of {', '.join(options.only)}\n"
            "names are those of the catalogue, such as F7 or C1"
        )
    return {
        "version": __version__,
        "engine": options.engine,
        "seed": options.seed,
        "passed": all(result.passed for result in results),
        "results": [result.as_json() for result in results],
    }


def names(engine: str) -> int:
    """How many results there will be at most, for a progress bar; 0 where only the engine's part knows."""
    if engine != HARNESS:
        return 0
    from kv_canary.faults.catalogue import FAULTS
    from kv_canary.faults.controls import CONTROLS

    return len(FAULTS) + len(CONTROLS)


def _run_harness(request: FaultRequest) -> None:
    from kv_canary.faults.catalogue import FAULTS
    from kv_canary.faults.controls import CONTROLS

    for fault in FAULTS:
        if request.wanted(fault.name):
            request.begin(fault.name)
            request.each(attempted(partial(run_fault, fault, request.seed), fault, HARNESS, expected=fault.checks))
    for control in CONTROLS:
        if request.wanted(control.name):
            request.begin(control.name)
            request.each(attempted(partial(run_control, control, request.seed), control, HARNESS))


def run_fault(fault: Any, seed: int) -> Result:
    """One fault on a stage of its own: legal traffic, the injection, and legal traffic again."""
    from kv_canary.faults.stage import Stage

    stage = Stage(seed)
    stage.warm()
    before = len(stage.incidents)
    pages: set[int] = fault.inject(stage)
    injected = time.monotonic()

    def is_caught() -> bool:
        found = stage.canary.snapshot.incidents
        return any(one.check in fault.checks and pages & {one.page, *one.neighbours} for one in found)

    caught = stage.until(is_caught)
    seconds = time.monotonic() - injected
    stage.swept()
    result = judged(
        fault.name,
        fault.title,
        HARNESS,
        expected=fault.checks,
        cause=fault.cause,
        pages=pages,
        incidents=stage.incidents,
        seconds=round(seconds, 4) if caught else None,
        previous_owner=fault.previous_owner,
    )
    return result if not before else _with_problem(result, f"{before} alarms before the injection")


def run_control(control: Any, seed: int) -> Result:
    """One control on a stage of its own; silent, and awake at the end."""
    from kv_canary.faults.stage import Stage

    stage = Stage(seed)
    stage.warm()
    verified = stage.verified_pages
    control.run(stage)
    stage.settle()
    stage.swept()
    alarms = stage.incidents
    problems = []
    if alarms:
        problems.append(alarms[0].summary)
    if stage.verified_pages <= verified:
        problems.append("nothing was verified")
    if stage.canary.snapshot.errors:
        problems.append("; ".join(stage.canary.snapshot.last_errors))
    if not stage.is_awake():
        problems.append("a drill afterwards was not detected")
    return Result(
        fault=control.name,
        title=control.title,
        engine=HARNESS,
        expected=(),
        caught=None,
        check=None,
        persistence=None,
        cause_guess=None,
        seconds=None,
        false_alarms=sum(one.pages_total for one in alarms),
        problem="; ".join(problems),
    )


def _with_problem(result: Result, problem: str) -> Result:
    from dataclasses import replace

    return replace(result, problem="; ".join(part for part in (problem, result.problem) if part))


def _find_engine(name: str) -> Callable[[FaultRequest], None]:
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in points:
        known = ", ".join((HARNESS, *sorted(points)))
        raise KVCanaryError(f"--engine: there are no faults for engine {name!r}; there are: {known}\n{_INSTALL}")
    try:
        engine: Callable[[FaultRequest], None] = points[name].load()
    except ImportError as error:
        raise KVCanaryError(f"--engine: the faults of {name} cannot be loaded: {error}\n{_INSTALL}") from error
    return engine


_INSTALL = "pip install 'kv-canary[demo]'"


@contextmanager
def _quiet() -> Iterator[None]:
    """Alarms are what is wanted here: they go into the table, not onto the terminal."""
    logger = logging.getLogger("kv_canary")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
