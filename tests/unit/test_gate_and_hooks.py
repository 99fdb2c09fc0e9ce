"""The gate and the hooks: whatever fails on our side, the engine goes on and gets its objects back as they were."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from kv_canary import hooks as hooks_module
from kv_canary.errors import CanaryMismatchError, UnsupportedEngineError
from kv_canary.gate import EngineGate
from kv_canary.hooks import Hooks, expect_method


class Engine:
    """An engine with one method that adds, and one that fails."""

    def __init__(self) -> None:
        self.calls = 0

    def add(self, left: int, right: int = 1) -> int:
        """Adds."""
        self.calls += 1
        return left + right

    def fail(self) -> None:
        raise LookupError("the engine's own")


class ChildEngine(Engine): ...


class Port:
    """An `EnginePort` that notes what it is asked, and does what a test puts in."""

    def __init__(self, resync: Callable[[], None] = lambda: None, quarantine: Callable[[], str] = lambda: "taken out"):
        self.asked: list[Any] = []
        self._resync, self._quarantine = resync, quarantine

    def resync(self) -> None:
        self.asked.append("resync")
        self._resync()

    def quarantine(self, space: str, page: int) -> str:
        self.asked.append((space, page))
        return self._quarantine()


def broken(*arguments: Any, **keywords: Any) -> None:
    raise RuntimeError("the canary's own")


def open_gate() -> EngineGate:
    gate = EngineGate()
    gate.open()
    gate.boundary(Port())
    assert gate.recording
    return gate


@pytest.fixture
def gate() -> EngineGate:
    return open_gate()


@pytest.fixture
def engine() -> Engine:
    return Engine()


# Hooks


def test_a_hook_sees_the_call_before_and_after_the_original(gate: EngineGate, engine: Engine) -> None:
    seen: list[Any] = []
    Hooks(gate).wrap(
        engine,
        "add",
        event="allocate",
        before=lambda left, right: seen.append(("before", left, right, engine.calls)) or "token",
        after=lambda token, result, left, right: seen.append(("after", token, result, left, right, engine.calls)),
    )
    assert engine.add(2, right=3) == 5
    assert seen == [("before", 2, 3, 0), ("after", "token", 5, 2, 3, 1)]


def test_a_hook_of_a_class_sees_every_instance(gate: EngineGate) -> None:
    seen: list[Any] = []
    hooks = Hooks(gate)
    hooks.wrap(Engine, "add", event="allocate", before=lambda self, left: seen.append((self, left)))
    try:
        first, second = Engine(), ChildEngine()
        assert (first.add(1), second.add(2)) == (2, 3)
    finally:
        hooks.remove()
    assert seen == [(first, 1), (second, 2)]


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_hook_that_fails_closes_the_gate_and_the_original_still_runs_and_returns(
    gate: EngineGate, engine: Engine, place: str
) -> None:
    Hooks(gate).wrap(engine, "add", event="allocate", **{place: broken})  # type: ignore[arg-type]
    assert engine.add(2) == 3
    assert engine.calls == 1
    assert not gate.recording
    assert gate.failure == ("allocate", "RuntimeError: the canary's own")


def test_after_is_not_called_when_before_has_failed(gate: EngineGate, engine: Engine) -> None:
    seen: list[int] = []
    Hooks(gate).wrap(engine, "add", event="allocate", before=broken, after=lambda *arguments: seen.append(1))
    engine.add(2)
    assert seen == []


def test_a_failure_is_logged_once(gate: EngineGate, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    hooks = Hooks(gate)
    hooks.wrap(engine, "add", event="allocate", before=broken)
    engine.add(2)
    engine.add(2)
    gate.fail("free", RuntimeError("another"))
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.ERROR, "kv_canary")
    assert record.getMessage() == "canary hook allocate failed; this engine is no longer guarded"
    assert record.exc_info is not None
    assert gate.failure == ("allocate", "RuntimeError: the canary's own")


def test_one_failed_hook_silences_all_hooks_of_its_gate(gate: EngineGate, engine: Engine) -> None:
    other, seen = Engine(), []
    hooks = Hooks(gate)
    hooks.wrap(engine, "add", event="allocate", before=broken)
    hooks.wrap(other, "add", event="free", before=lambda left: seen.append(left))
    engine.add(1)
    assert other.add(1) == 2
    assert seen == []


@pytest.mark.parametrize("recording", [True, False])
def test_the_engine_s_exceptions_pass_through_and_are_no_failure_of_ours(engine: Engine, recording: bool) -> None:
    gate = open_gate() if recording else EngineGate()
    seen: list[str] = []
    Hooks(gate).wrap(engine, "fail", event="free", before=lambda: None, after=lambda *arguments: seen.append("after"))
    with pytest.raises(LookupError, match="the engine's own"):
        engine.fail()
    assert (seen, gate.failure, gate.recording) == ([], None, recording)


def test_a_closed_gate_makes_a_hook_a_plain_call(engine: Engine) -> None:
    gate = EngineGate()
    Hooks(gate).wrap(engine, "add", event="allocate", before=broken, after=broken)
    assert engine.add(2, right=2) == 4
    assert (gate.failure, gate.hook_seconds) == (None, {"allocate": 0.0})


def test_a_gate_that_closes_during_the_call_ends_it_plainly(gate: EngineGate, engine: Engine) -> None:
    hooks = Hooks(gate)
    hooks.wrap(engine, "add", event="allocate", before=lambda left: gate.close(), after=broken)
    assert engine.add(2) == 3
    assert gate.failure is None


def test_a_hooked_method_looks_like_the_original(gate: EngineGate, engine: Engine) -> None:
    Hooks(gate).wrap(engine, "add", event="allocate")
    assert (engine.add.__name__, engine.add.__doc__) == ("add", "Adds.")
    expect_method(engine, "add", ("left", "right"))


def test_the_seconds_of_hooks_are_added_up_by_event_without_the_original_s(
    gate: EngineGate, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(hooks_module, "perf_counter", lambda: now[0])

    def takes(seconds: float) -> Callable[..., None]:
        def work(*arguments: Any) -> None:
            now[0] += seconds

        return work

    engine.add = takes(100.0)  # type: ignore[method-assign]
    hooks = Hooks(gate)
    hooks.wrap(engine, "add", event="allocate", before=takes(1.0), after=takes(2.0))
    hooks.wrap(engine, "fail", event="free")
    engine.add(1)
    engine.add(1)
    assert gate.hook_seconds == {"allocate": 6.0, "free": 0.0}


def test_the_seconds_of_a_hook_that_fails_count_too(
    gate: EngineGate, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter([1.0, 5.0])
    monkeypatch.setattr(hooks_module, "perf_counter", lambda: next(ticks))
    Hooks(gate).wrap(engine, "add", event="allocate", before=broken)
    engine.add(1)
    assert gate.hook_seconds == {"allocate": 4.0}


def test_remove_leaves_an_instance_exactly_as_it_was(gate: EngineGate, engine: Engine) -> None:
    before = dict(vars(engine))
    hooks = Hooks(gate)
    hooks.wrap(engine, "add", event="allocate")
    assert "add" in vars(engine)
    hooks.remove()
    assert vars(engine) == before
    assert engine.add.__func__ is Engine.add  # type: ignore[attr-defined]


def test_remove_restores_an_instance_s_own_attribute(gate: EngineGate, engine: Engine) -> None:
    own = lambda left: left  # noqa: E731
    engine.add = own  # type: ignore[method-assign]
    hooks = Hooks(gate)
    hooks.wrap(engine, "add", event="allocate")
    hooks.remove()
    assert vars(engine)["add"] is own


@pytest.mark.parametrize("owner", [Engine, ChildEngine], ids=["own method", "inherited method"])
def test_remove_leaves_a_class_exactly_as_it_was(gate: EngineGate, owner: type) -> None:
    before, hooks = dict(vars(owner)), Hooks(gate)
    hooks.wrap(owner, "add", event="allocate")
    assert vars(owner)["add"] is not before.get("add")
    hooks.remove()
    assert dict(vars(owner)) == before


def test_hooks_on_hooks_come_off_in_reverse(gate: EngineGate, engine: Engine) -> None:
    seen: list[str] = []
    hooks = Hooks(gate)
    hooks.wrap(engine, "add", event="allocate", before=lambda left: seen.append("inner"))
    hooks.wrap(engine, "add", event="free", before=lambda left: seen.append("outer"))
    assert engine.add(1) == 2
    hooks.remove()
    hooks.remove()
    assert engine.add(1) == 2
    assert seen == ["outer", "inner"]
    assert "add" not in vars(engine)


def test_a_replacement_stays_until_remove(gate: EngineGate, engine: Engine) -> None:
    hooks = Hooks(gate)
    hooks.replace(engine, "add", lambda left: -left)
    assert engine.add(1) == -1
    hooks.remove()
    assert engine.add(1) == 2


# expect_method


@pytest.mark.parametrize("owner", [Engine, Engine()], ids=["class", "instance"])
def test_a_method_of_the_expected_shape_is_accepted(owner: Any) -> None:
    expect_method(owner, "add", ("left", "right"))
    expect_method(owner, "add", ("left",))
    expect_method(owner, "add", ())


@pytest.mark.parametrize("owner", [Engine, Engine()], ids=["class", "instance"])
def test_a_method_of_another_shape_is_named_with_both_shapes(owner: Any) -> None:
    with pytest.raises(
        UnsupportedEngineError, match=r"^hook target Engine\.add takes \(left, right\), expected \(right, left\)$"
    ):
        expect_method(owner, "add", ("right", "left"))
    with pytest.raises(UnsupportedEngineError, match=r"takes \(left, right\), expected \(left, right, more\)"):
        expect_method(owner, "add", ("left", "right", "more"))


@pytest.mark.parametrize("name", ["subtract", "calls"], ids=["missing", "not callable"])
def test_a_method_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=rf"^hook target ChildEngine\.{name} does not exist$"):
        expect_method(ChildEngine(), name, ())


# The gate


def test_a_gate_is_closed_at_first() -> None:
    gate = EngineGate()
    assert (gate.recording, gate.opening, gate.epoch, gate.failure) == (False, False, 0, None)


def test_a_boundary_does_nothing_when_nothing_is_wanted() -> None:
    gate, port = EngineGate(), Port()
    gate.boundary(port)
    assert (port.asked, gate.recording, gate.epoch) == ([], False, 0)


def test_opening_waits_for_a_step_boundary_and_reads_the_engine_s_tables_first() -> None:
    gate = EngineGate()
    gate.open()
    assert (gate.recording, gate.opening) == (False, True)
    recording_in_resync = []
    port = Port(resync=lambda: recording_in_resync.append(gate.recording))
    gate.boundary(port)
    gate.boundary(port)
    assert (port.asked, recording_in_resync, gate.recording, gate.opening) == (["resync"], [False], True, False)


def test_closing_is_at_once(gate: EngineGate) -> None:
    gate.close()
    assert not gate.recording


def test_the_epoch_grows_at_each_change() -> None:
    gate, epochs = EngineGate(), [0]
    for change in (
        lambda: (gate.open(), gate.boundary(Port())),
        gate.close,
        lambda: (gate.open(), gate.boundary(Port())),
        lambda: gate.fail("allocate", RuntimeError()),
        lambda: (gate.open(), gate.boundary(Port())),
        lambda: (gate.close(), gate.open(), gate.boundary(Port())),
    ):
        change()
        epochs.append(gate.epoch)
    assert epochs == sorted(set(epochs))


def test_a_boundary_that_changes_nothing_keeps_the_epoch(gate: EngineGate) -> None:
    epoch = gate.epoch
    gate.quarantine("full", 3, "inc-1")
    gate.boundary(Port())
    assert gate.epoch == epoch


def test_a_resync_that_fails_keeps_the_gate_closed_and_the_engine_going(caplog: pytest.LogCaptureFixture) -> None:
    gate = EngineGate()
    gate.open()
    gate.boundary(Port(resync=broken))
    assert (gate.recording, gate.opening) == (False, False)
    assert gate.failure == ("resync", "RuntimeError: the canary's own")
    assert len(caplog.records) == 1


def test_a_hook_that_fails_during_the_resync_keeps_the_gate_closed() -> None:
    gate = EngineGate()
    gate.open()
    gate.boundary(Port(resync=lambda: gate.fail("allocate", RuntimeError("meanwhile"))))
    assert not gate.recording
    assert gate.failure == ("allocate", "RuntimeError: meanwhile")


def test_a_gate_that_is_closed_during_the_resync_stays_closed() -> None:
    gate = EngineGate()
    gate.open()
    gate.boundary(Port(resync=gate.close))
    assert (gate.recording, gate.opening, gate.failure) == (False, False, None)
    gate.boundary(Port())
    assert not gate.recording


def test_a_gate_that_is_closed_and_opened_during_the_resync_opens_at_the_next_boundary() -> None:
    gate = EngineGate()
    gate.open()
    gate.boundary(Port(resync=lambda: (gate.close(), gate.open())))  # type: ignore[arg-type]
    assert (gate.recording, gate.opening) == (False, True)
    port = Port()
    gate.boundary(port)
    assert (gate.recording, port.asked) == (True, ["resync"])


def test_a_gate_that_is_closed_before_the_boundary_never_opens() -> None:
    gate, port = EngineGate(), Port()
    gate.open()
    gate.close()
    gate.boundary(port)
    assert (gate.recording, gate.opening, port.asked) == (False, False, [])


def test_opening_again_after_a_failure_forgets_it_and_logs_the_next(caplog: pytest.LogCaptureFixture) -> None:
    gate = open_gate()
    gate.fail("allocate", RuntimeError("first"))
    gate.open()
    assert gate.failure is None
    gate.boundary(Port())
    gate.fail("free", RuntimeError("second"))
    assert gate.failure == ("free", "RuntimeError: second")
    assert len(caplog.records) == 2


def test_a_quarantine_is_carried_out_at_the_boundary_in_order(gate: EngineGate) -> None:
    port = Port()
    gate.quarantine("full", 3, "inc-1")
    gate.quarantine("swa", 4, "inc-2")
    assert gate.reactions_done() == []
    gate.boundary(port)
    assert port.asked == [("full", 3), ("swa", 4)]
    assert gate.reactions_done() == [("inc-1", "taken out"), ("inc-2", "taken out")]
    assert gate.reactions_done() == []


def test_a_quarantine_that_fails_closes_the_gate_and_says_so_in_its_reaction(gate: EngineGate) -> None:
    gate.quarantine("full", 3, "inc-1")
    gate.boundary(Port(quarantine=broken))  # type: ignore[arg-type]
    assert gate.reactions_done() == [("inc-1", 'quarantine failed: RuntimeError("the canary\'s own")')]
    assert (gate.recording, gate.failure) == (False, ("reaction", "RuntimeError: the canary's own"))


def test_closing_drops_what_was_to_be_done(gate: EngineGate) -> None:
    port = Port()
    gate.quarantine("full", 3, "inc-1")
    gate.raise_at_next_step("bad")
    gate.close()
    gate.boundary(port)
    assert port.asked == []


def test_a_gate_that_is_closed_between_the_look_and_the_grip_raises_nothing(gate: EngineGate) -> None:
    """The canary thread empties the queue while the engine's thread is about to take from it."""

    class Emptied(deque[Any]):
        def __len__(self) -> int:
            return 1

        def __bool__(self) -> bool:
            return True

    gate._quarantine = Emptied()
    gate.boundary(Port())
    assert gate.failure is None


def test_a_mismatch_is_raised_once_at_the_next_boundary(gate: EngineGate) -> None:
    gate.raise_at_next_step("page 3 of full is wrong")
    with pytest.raises(CanaryMismatchError, match="page 3 of full is wrong"):
        gate.boundary(Port())
    gate.boundary(Port())
    assert gate.recording


def test_quarantines_come_before_the_raise(gate: EngineGate) -> None:
    port = Port()
    gate.quarantine("full", 3, "inc-1")
    gate.raise_at_next_step("bad")
    with pytest.raises(CanaryMismatchError):
        gate.boundary(port)
    assert port.asked == [("full", 3)]
