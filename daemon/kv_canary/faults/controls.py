"""Negative controls: what a healthy engine does to its pages, under pressure. None of it may raise anything.

Each runs against a canary that reads all the time; at the end a drill proves that it was awake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kv_canary.commands import SetEnabled
from kv_canary.faults.pool import PAGE_TOKENS
from kv_canary.faults.stage import Stage, must

ROUNDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Something legitimate. `run` drives it; what it asserts is that it really happened."""

    name: str
    title: str
    run: Callable[[Stage], None]


def _keep_busy(stage: Stage, requests: int = 5) -> None:
    """So many requests at a time, half of them with a prefix that others have."""
    engine = stage.engine
    while len(engine.active) < requests:
        shared = [7] * (2 * PAGE_TOKENS) if stage.random.random() < 0.5 else []
        engine.submit(shared + stage.prompt(stage.random.randrange(20, 90)), stage.random.randrange(2, 40))


def _recycling(stage: Stage) -> None:
    for _ in range(ROUNDS):
        _keep_busy(stage, requests=7)
        stage.steps(1)
        if len(stage.engine.free) > 8:
            stage.engine.evict(2)
    must(stage.engine.finished > 10, "requests finish")


def _preemption(stage: Stage) -> None:
    preempted = 0
    for round_ in range(ROUNDS):
        _keep_busy(stage)
        stage.steps(1)
        if round_ % 4 == 0:
            stage.engine.preempt(stage.random.choice(list(stage.engine.active.values())))
            preempted += 1
    must(preempted > 0, "requests are preempted")


def _chunked_prefill(stage: Stage) -> None:
    for _ in range(ROUNDS // 10):
        request = stage.engine.submit(stage.prompt(9 * PAGE_TOKENS + 3), 3)
        stage.serve(request)


def _forks(stage: Stage) -> None:
    forked = 0
    for round_ in range(ROUNDS):
        _keep_busy(stage, requests=3)
        stage.steps(1)
        request = stage.random.choice(list(stage.engine.active.values()) or [None])
        if round_ % 3 == 0 and request is not None and request.computed % PAGE_TOKENS and len(stage.engine.active) < 6:
            stage.engine.fork(request)
            forked += 1
    must(forked > 0, "requests fork")


def _rejected_drafts(stage: Stage) -> None:
    for _ in range(ROUNDS):
        _keep_busy(stage, requests=4)
        stage.steps(1, drafts=stage.random.randrange(1, 6))


def _same_step_hits(stage: Stage) -> None:
    engine = stage.engine
    engine.eager = True
    hits = 0
    for _ in range(ROUNDS // 6):
        tokens = stage.prompt(PAGE_TOKENS + 6)
        engine.submit(tokens, 4)
        twin = engine.submit(tokens, 4)
        stage.steps(1)
        hits += bool(twin.sealed)
        stage.steps(6)
    must(hits > 0, "a page is hit in the step that writes it")


def _exact_hit(stage: Stage) -> None:
    tokens = stage.prompt(3 * PAGE_TOKENS)
    for _ in range(8):
        request = stage.engine.submit(tokens, 3)
        stage.serve(request)
    must(stage.canary.settle().groups[0].counters.claims > 0, "the prefix is hit")


def _cancelled(stage: Stage) -> None:
    for round_ in range(ROUNDS):
        _keep_busy(stage)
        stage.steps(1)
        if round_ % 3 == 0:
            stage.engine.cancel(stage.random.choice(list(stage.engine.active.values())))


def _sleep(stage: Stage) -> None:
    """The engine takes its memory away, what it held is lost, and it wakes up empty."""
    engine, canary = stage.engine, stage.canary
    for _ in range(3):
        _keep_busy(stage)
        stage.steps(8)
        must(canary.suspension.suspend("sleep", 1.0), "reading stops")
        for request in list(engine.active.values()):
            engine.cancel(request)
        engine.evict(engine.pool.pages)
        engine.gate.forget()
        engine.pool.bytes[:] = 0
        for _ in range(5):
            canary.tick()
        canary.suspension.resume("sleep")
    _keep_busy(stage)
    stage.steps(8)


def _toggled(stage: Stage) -> None:
    for round_ in range(ROUNDS):
        _keep_busy(stage)
        stage.steps(1)
        if round_ % 10 in (4, 9):
            stage.canary.obey(SetEnabled(enabled=round_ % 10 == 9))
    stage.canary.obey(SetEnabled(enabled=True))
    stage.steps(3)


def _tier(stage: Stage) -> None:
    """Requests go to the tier and come back all the time."""
    engine, waiting = stage.engine, []
    for round_ in range(ROUNDS):
        _keep_busy(stage)
        stage.steps(1)
        ready = [one for one in engine.active.values() if one.sealed and not one.finished]
        if round_ % 2 and ready:
            waiting.append(stage.random.choice(ready))
            engine.offload(waiting[-1])
        if len(waiting) > 3:
            engine.begin_step()
            engine.restore(waiting.pop(0))
    counters = stage.canary.settle().groups[0].counters
    must(counters.transfers["verified"] > 0, "pages come back")


def _tier_while_toggled(stage: Stage) -> None:
    """Copies that were made while the canary was silent come back while it is not, and the other way round."""
    engine, waiting = stage.engine, []
    for round_ in range(ROUNDS):
        _keep_busy(stage)
        stage.steps(1)
        ready = [one for one in engine.active.values() if one.sealed and not one.finished]
        if ready:
            waiting.append(stage.random.choice(ready))
            engine.offload(waiting[-1])
        if len(waiting) > 2:
            engine.begin_step()
            engine.restore(waiting.pop(0))
        if round_ % 7 in (3, 6):
            stage.canary.obey(SetEnabled(enabled=round_ % 7 == 6))
    stage.canary.obey(SetEnabled(enabled=True))
    stage.steps(3)


CONTROLS: tuple[Control, ...] = (
    Control(name="C1", title="legitimate recycling under pressure", run=_recycling),
    Control(name="C2", title="preemption and recompute", run=_preemption),
    Control(name="C3", title="chunked prefill", run=_chunked_prefill),
    Control(name="C4", title="copy-on-write forks", run=_forks),
    Control(name="C5", title="draft tokens that are rejected", run=_rejected_drafts),
    Control(name="C6", title="prefix hits in the step that writes the pages", run=_same_step_hits),
    Control(name="C7", title="an exact full hit", run=_exact_hit),
    Control(name="C8", title="requests cancelled in the middle", run=_cancelled),
    Control(name="C9", title="sleep that discards the cache, and wake", run=_sleep),
    Control(name="C10", title="the master switch toggled under load", run=_toggled),
    Control(name="C11", title="requests to the host tier and back", run=_tier),
    Control(name="C12", title="the same while the master switch is toggled", run=_tier_while_toggled),
)
