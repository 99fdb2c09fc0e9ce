"""What the canary thread holds for each page-number space and each of its groups."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_canary.gate import EngineGate
from kv_canary.geometry import CanaryGroup
from kv_canary.ledger import Ledger, Work
from kv_canary.transfers import Transfers
from kv_canary.verifier import Verifier


@dataclass(slots=True, kw_only=True)
class GroupGuard:
    """One group under guard: its switch, its verifier, and where its sweeps stand.

    Written by the canary thread alone.
    """

    verifier: Verifier
    gate: EngineGate
    enabled: bool = True
    disabled_reason: str | None = None
    position: int = 0
    sweep_started_at: float | None = None  # seconds since 1970
    last_finished_at: float | None = None  # seconds since 1970
    last_duration: float | None = None
    adopting: int | None = None  # position of the pass that fingerprints pages sealed while the group was off
    oldest_age: float = 0.0
    state_counts: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    claims_not_covered: int = 0
    transfers: Transfers = field(init=False)

    def __post_init__(self) -> None:
        self.transfers = Transfers(self.verifier)

    @property
    def group(self) -> CanaryGroup:
        return self.verifier.group

    @property
    def ledger(self) -> Ledger:
        return self.verifier.ledger

    @property
    def active(self) -> bool:
        """Pages of this group may be read."""
        return self.enabled and self.gate.recording and bool(self.group.stripes)

    def switch(self, enabled: bool, reason: str | None = None) -> None:
        if enabled and not self.enabled:
            self.adopting = 0
        self.enabled = enabled
        self.disabled_reason = None if enabled else reason


@dataclass(slots=True, kw_only=True)
class Space:
    """A ledger and the groups that share its page numbers. `held` is work whose fence is still ahead of us."""

    ledger: Ledger
    gate: EngineGate
    guards: list[GroupGuard] = field(default_factory=list)
    held: Work | None = None
