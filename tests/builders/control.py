"""A stand-in for the sidecar: answers with a prepared snapshot and notes what is submitted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from builders.snapshots import make_drill, make_snapshot, make_sweep
from kv_canary.commands import Command, PatchSettings, RequestDrill, RequestSweep, SetEnabled, SetGroupEnabled
from kv_canary.snapshot import Snapshot


class FakeControl:
    """Carries a command out at once, the way the canary thread would: the snapshot first, the future after it.

    `answer` replaces that: it gives the command's result or raises. With `silent`, a future stays open for ever.
    """

    def __init__(
        self, snapshot: Snapshot | None = None, *, answer: Callable[[Command], Any] | None = None, silent: bool = False
    ) -> None:
        self.current = snapshot or make_snapshot()
        self.commands: list[Command] = []
        self.futures: list[Future[Any]] = []
        self._answer, self._silent = answer or self._carry_out, silent

    def snapshot(self) -> Snapshot:
        return self.current

    def submit(self, command: Command) -> Future[Any]:
        self.commands.append(command)
        future: Future[Any] = Future()
        self.futures.append(future)
        if self._silent:
            return future
        try:
            future.set_result(self._answer(command))
        except Exception as error:  # noqa: BLE001  whatever it is, it is the command's answer
            future.set_exception(error)
        return future

    def publish(self, **changes: Any) -> None:
        self.current = replace(self.current, **changes)

    def _carry_out(self, command: Command) -> Any:
        snapshot = self.current
        if isinstance(command, SetEnabled):
            self.publish(enabled=command.enabled, state="running" if command.enabled else "disabled")
        elif isinstance(command, SetGroupEnabled):
            groups = (replace(g, enabled=command.enabled) if g.name == command.group else g for g in snapshot.groups)
            self.publish(groups=tuple(groups))
        elif isinstance(command, PatchSettings):
            self.publish(settings=snapshot.settings.patched(command.changes))
        elif isinstance(command, RequestSweep):
            names = tuple(group.name for group in snapshot.groups if command.group in (None, group.name))
            sweep = make_sweep(id=f"sweep-{len(snapshot.sweeps) + 1}", groups=names)
            self.publish(sweeps=(*snapshot.sweeps, sweep))
            return sweep
        elif isinstance(command, RequestDrill):
            drill = make_drill(id=f"drill-{len(snapshot.drills) + 1}", kind=command.kind, alert=command.alert)
            self.publish(drills=(*snapshot.drills, drill))
            return drill
        return None
