"""What events leave for the canary thread to do with bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

WorkKind = Literal["seal", "free", "claim", "move", "adopt"]


class Fence(Protocol):
    """A point in the engine's work: everything queued before it has run once `ready()` is true. Never blocks."""

    def ready(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Pages with the generations they had when the event happened, int64, where the ledger's page numbers live.

    seal, adopt, free: fingerprint them (pages freed with a valid fingerprint keep it). claim: verify them first.
    move: `sources` hand their fingerprints to `pages`. A fence holds it back until the bytes are there.
    """

    kind: WorkKind
    pages: Any
    generations: Any
    fence: Fence | None = None
    sources: Any = None
    source_generations: Any = None
