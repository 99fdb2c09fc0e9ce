"""What a soak asks of an engine: a rig that is under pressure by itself, and can be spoiled."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from kv_canary.sidecar import Sidecar
from kv_canary.snapshot import Check


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoiled:
    """A page that was changed behind the engine's back. `mend` puts it back as it was."""

    page: int
    check: Check
    mend: Callable[[], None]


class Rig(Protocol):
    """An engine that is under pressure, in threads of its own, and its sidecar."""

    name: str
    sidecar: Sidecar

    def paused(self) -> AbstractContextManager[object]:
        """Between two steps; the sidecar goes on."""

    def spoil(self, choose: random.Random) -> Spoiled | None:
        """Changes a page that has a fingerprint; None if there is none now. Inside `paused`, settled."""

    def work_done(self) -> dict[str, int]:
        """What the engine has got done, for people."""

    def stop(self) -> None:
        """Ends the engine's thread; raises what it died of."""
