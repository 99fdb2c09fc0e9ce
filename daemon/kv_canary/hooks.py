"""Hooks: wrappers around an engine's own methods that tell the ledger what happens, and can never hurt the engine.

A hook that fails closes the gate (once, logged) and the engine goes on; a closed gate makes every hook a plain call.
Seconds spent in hooks are added up by event. All of it runs on the engine's thread; installing and removing is done by
whoever attaches, and leaves the engine's objects exactly as they were.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from time import perf_counter
from typing import Any

from kv_canary.errors import UnsupportedEngineError
from kv_canary.gate import EngineGate


def expect_method(owner: Any, name: str, parameters: tuple[str, ...]) -> None:
    """Raises `UnsupportedEngineError` unless `owner.name` is callable and takes parameters of these names, in this
    order.
    """
    label = f"{(owner if inspect.isclass(owner) else type(owner)).__qualname__}.{name}"
    method = getattr(owner, name, None)
    if not callable(method):
        raise UnsupportedEngineError(f"hook target {label} does not exist")
    found = tuple(inspect.signature(method).parameters)
    if inspect.isclass(owner):
        found = found[1:]
    if found[: len(parameters)] != parameters:
        raise UnsupportedEngineError(
            f"hook target {label} takes ({', '.join(found)}), expected ({', '.join(parameters)})"
        )


class Hooks:
    """The hooks of one attachment."""

    def __init__(self, gate: EngineGate) -> None:
        self._gate = gate
        self._installed: list[tuple[Any, str, bool, Any]] = []

    def wrap(
        self,
        owner: Any,
        name: str,
        *,
        event: str,
        before: Callable[..., Any] | None = None,
        after: Callable[..., None] | None = None,
    ) -> None:
        """Wraps `owner.name`.

        `before(*args, **kwargs)` runs ahead of the original; what it returns is handed to `after(token, result, *args,
        **kwargs)`, which runs when the original has returned. Neither sees a call made while the gate is closed.
        """
        gate, seconds = self._gate, self._gate.hook_seconds
        seconds.setdefault(event, 0.0)
        original = getattr(owner, name)

        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            if not gate.recording:
                return original(*args, **kwargs)
            token = None
            if before is not None:
                started = perf_counter()
                try:
                    token = before(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 - the engine must never see it
                    gate.fail(event, error)
                seconds[event] += perf_counter() - started
            result = original(*args, **kwargs)
            if after is not None and gate.recording:
                started = perf_counter()
                try:
                    after(token, result, *args, **kwargs)
                except Exception as error:  # noqa: BLE001 - the engine must never see it
                    gate.fail(event, error)
                seconds[event] += perf_counter() - started
            return result

        self.replace(owner, name, hooked)

    def replace(self, owner: Any, name: str, replacement: Any) -> None:
        """Puts `replacement` in the place of `owner.name` until `remove`."""
        own = vars(owner)
        self._installed.append((owner, name, name in own, own.get(name)))
        setattr(owner, name, replacement)

    def remove(self) -> None:
        """Restores every target, the last one first."""
        while self._installed:
            owner, name, was_own, value = self._installed.pop()
            if was_own:
                setattr(owner, name, value)
            else:
                delattr(owner, name)
