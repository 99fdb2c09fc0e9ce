"""What came of a fault or a control: one row, alike for every engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from kv_canary.snapshot import Incident


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`caught` is None for a control, where nothing was to be caught. `expected` names the checks that may catch it.

    `seconds` run from the injection to the incident. `problem` says what was not as it should be, empty if all was.
    """

    fault: str
    title: str
    engine: str
    expected: tuple[str, ...]
    caught: bool | None
    check: str | None
    persistence: str | None
    cause_guess: str | None
    seconds: float | None
    false_alarms: int
    problem: str = ""

    @property
    def passed(self) -> bool:
        return self.caught is not False and not self.false_alarms and not self.problem

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRequest:
    """What an engine's part is asked for: the faults whose names are `wanted`, each by `seed`.

    `each` is told every result as it is there.
    """

    seed: int
    wanted: Callable[[str], bool]
    begin: Callable[[str], None] = lambda name: None
    each: Callable[[Result], None] = lambda result: None


class Named(Protocol):
    """A fault or a control of any engine."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...


def attempted(work: Callable[[], Result], one: Named, engine: str, *, expected: Sequence[str] | None = None) -> Result:
    """What `work` gives. A scenario that did not come about, or broke the engine, is a row too: the others go on."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - said in the row
        return Result(
            fault=one.name,
            title=one.title,
            engine=engine,
            expected=tuple(expected or ()),
            caught=None if expected is None else False,
            check=None,
            persistence=None,
            cause_guess=None,
            seconds=None,
            false_alarms=0,
            problem=f"{type(error).__name__}: {error}",
        )


def judged(
    name: str,
    title: str,
    engine: str,
    *,
    expected: Sequence[str],
    cause: str,
    pages: set[int],
    incidents: Sequence[Incident],
    seconds: float | None,
    previous_owner: str | None = None,
) -> Result:
    """The result of a fault that spoiled `pages`: the first incident that speaks of one of them, by a right check."""
    own = [one for one in incidents if pages & {one.page, *one.neighbours}]
    hits = [one for one in own if one.check in expected]
    hit = hits[0] if hits else None
    problems = []
    if hit is not None and cause not in hit.cause:
        problems.append(f"the cause is to say {cause!r}")
    if hit is not None and previous_owner is not None and hit.previous_owner != previous_owner:
        problems.append(f"the previous owner is to be {previous_owner}, not {hit.previous_owner}")
    if hit is None and own:
        problems.append(f"found as {own[0].check}: {own[0].cause}")
    return Result(
        fault=name,
        title=title,
        engine=engine,
        expected=tuple(expected),
        caught=hit is not None,
        check=hit.check if hit else None,
        persistence=hit.persistence if hit else None,
        cause_guess=hit.cause if hit else None,
        seconds=seconds if hit else None,
        false_alarms=sum(one.pages_total for one in incidents if one not in own),
        problem="; ".join(problems),
    )
