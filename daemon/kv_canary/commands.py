"""What the outside may ask of the canary thread. A command is a value; the thread answers through the command's future.

This is the whole way in: the HTTP thread and the host's own code put commands, the canary thread alone carries them
out.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from kv_canary.snapshot import DrillKind, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class SetEnabled:
    """Master switch. Answer: None."""

    enabled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SetGroupEnabled:
    """Switch of one group. Answer: None; `NotFoundError` for an unknown group."""

    group: str
    enabled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchSettings:
    """Change live settings. Answer: None; `SettingsError` leaves everything as it was."""

    changes: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSweep:
    """One pass now over one group, or over all (`group=None`). Answer: the `SweepRequest`."""

    group: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDrill:
    """Inject a fault.

    Answer: the `Drill`, running. `group=None` takes the first enabled group that has a verified page.
    """

    kind: DrillKind
    group: str | None = None
    alert: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MapPages:
    """The state of all pages of a group. Answer: the `PageMap`; `NotFoundError` for an unknown group."""

    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAtPage:
    """One page. Answer: the `PageDetails`; `NotFoundError` for an unknown group or page."""

    group: str
    page: int


Look = MapPages | LookAtPage
"""A command that changes nothing: no snapshot follows it."""

Command = SetEnabled | SetGroupEnabled | PatchSettings | RequestSweep | RequestDrill | Look


class Control(Protocol):
    """The sidecar as the HTTP layer sees it. Both methods may be called from any thread and return at once."""

    def snapshot(self) -> Snapshot: ...

    def submit(self, command: Command) -> Future[Any]: ...
