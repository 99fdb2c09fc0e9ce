"""What events leave for the canary thread to do with bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kv_canary.ledger.manifest import Manifest

WorkKind = Literal["seal", "free", "claim", "move", "adopt", "export", "admit"]


class Fence(Protocol):
    """A point in the engine's work: everything queued before it has run once `ready()` is true. Never blocks."""

    def ready(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Pages with the generations they had when the event happened, int64, where the ledger's page numbers live.

    seal, adopt, free: fingerprint them (pages freed with a valid fingerprint keep it). claim: verify them first.
    move: `sources` hand their fingerprints to `pages`; one with generation -1 was not sealed then. export: fill
    `manifest` with what is known of the pages, which held `identities`; one with generation -1 was not complete. admit:
    hold the pages against `manifest`; `identities` are what the engine said that they hold, None if it said nothing. A
    fence holds it back until the bytes are there.
    """

    kind: WorkKind
    pages: Any
    generations: Any
    fence: Fence | None = None
    sources: Any = None
    source_generations: Any = None
    manifest: Manifest | None = None
    identities: Any = None
