"""The ledger: what the canary knows of each page of one page-number space (state, generation, owners, identity).

`HostLedger` is for engines whose page numbers are host integers, `TensorLedger` for those whose page numbers are
tensors on the pool's device. Both run the same state machine, `transitions.PageTable`.
"""

from kv_canary.ledger.base import Ledger, LedgerRow
from kv_canary.ledger.host import HostLedger
from kv_canary.ledger.manifest import CopyLayout, Manifest, PageCopy
from kv_canary.ledger.states import FREE, LOADING, OPEN, SEALED, UNKNOWN, Reason, Violation
from kv_canary.ledger.tensor import TensorLedger
from kv_canary.ledger.work import Fence, Work, WorkKind

__all__ = [
    "FREE",
    "LOADING",
    "OPEN",
    "SEALED",
    "UNKNOWN",
    "CopyLayout",
    "Fence",
    "HostLedger",
    "Ledger",
    "LedgerRow",
    "Manifest",
    "PageCopy",
    "Reason",
    "TensorLedger",
    "Violation",
    "Work",
    "WorkKind",
]
