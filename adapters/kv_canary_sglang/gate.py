"""The gate of a scheduler: a quarantine is done on the canary thread, so that an idle server has it too."""

from __future__ import annotations

import numpy as np

from kv_canary.gate import EngineGate
from kv_canary.ledger import FREE, TensorLedger
from kv_canary_sglang.prefix_cache import Quarantined


class SchedulerGate(EngineGate):
    """`ranks` schedulers take every decision in step: one that went its own way would hang the others."""

    def __init__(self, quarantined: Quarantined, *, ranks: int) -> None:
        super().__init__()
        self.ledgers: dict[str, TensorLedger] = {}  # by space; filled before the canary thread knows of the gate
        self._quarantined = quarantined
        self._ranks = ranks

    # Canary thread

    def quarantine(self, space: str, page: int, incident: str) -> None:
        self.reacted(incident, self._quarantine_page(space, page))

    def _quarantine_page(self, space: str, page: int) -> str:
        if self._ranks > 1:
            return (
                f"quarantine not done: {self._ranks} ranks decide in step, and one of them cannot leave a page out "
                "alone; flush the cache (POST /flush_cache)"
            )
        ledger = self.ledgers[space]
        generation = int(ledger.generations(np.array([page]))[0])
        row = ledger.row(page)
        if row.state == FREE:
            return "quarantine: the page is free, no prefix hit can reach it"
        if row.identity == 0:
            return "quarantine failed: the page's tokens are not known; flush the cache (POST /flush_cache)"
        self._quarantined.add(row.identity, space, page, generation)
        return "quarantine: prefix hits end before the page until it is evicted"

    def reactions_done(self) -> list[tuple[str, str]]:
        for identity, (space, page, generation) in self._quarantined.items():
            if int(self.ledgers[space].generations(np.array([page]))[0]) != generation:
                self._quarantined.lift(identity)
        return super().reactions_done()
