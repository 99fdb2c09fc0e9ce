"""What the canary thread reads off a page table, alike for both kinds of ledger."""

from __future__ import annotations

from kv_canary.ledger.base import LedgerRow, OwnerNames, WorkQueue
from kv_canary.ledger.transitions import PageTable


class TableReader:
    """The reading half of a ledger that has its state in a `PageTable`."""

    _table: PageTable
    _names: OwnerNames
    _work: WorkQueue

    def row(self, page: int) -> LedgerRow:
        table = self._table
        return LedgerRow(
            page=page,
            state=int(table.state[page]),
            generation=int(table.generation[page]),
            owner=self._names.name(int(table.owner[page])),
            previous_owner=self._names.name(int(table.previous_owner[page])),
            owners=int(table.owners[page]),
            identity=int(table.identity[page]),
            changed_step=int(table.changed_step[page]),
        )

    def owner_name(self, handle: int) -> str | None:
        return self._names.name(handle)

    @property
    def engine_step(self) -> int:
        return self._table.step

    @property
    def claims(self) -> int:
        return self._work.claims

    @property
    def claims_not_covered(self) -> int:
        return int(self._table.claims_not_covered[0])
