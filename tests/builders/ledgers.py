"""Drives any ledger the way its engine would: page numbers where it wants them, and events applied before a look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kv_canary.ledger import HostLedger, Ledger, LedgerRow, Reason, TensorLedger, Violation, Work

# "kernel" is a tensor ledger whose events are Triton kernels, with blocks so small that a few pages fill several; where
# there is no GPU they are interpreted
KINDS = ("host", "tensor", "kernel")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Driver:
    """One ledger of 8 pages. Events take lists; looks apply first what is pending."""

    def __init__(self, kind: str, pages: int = 8, **options: Any) -> None:
        self.kind = kind
        self.device = DEVICE if kind == "kernel" else torch.device("cpu")
        self.ledger: Ledger
        if kind == "host":
            self.ledger = HostLedger("full", pages, **options)
        elif kind == "tensor":
            self.ledger = TensorLedger("full", pages, self.device, kernels=False, **options)
        else:
            self.ledger = TensorLedger("full", pages, self.device, kernels=True, **{"block": 2, **options})

    def array(self, values: Sequence[int]) -> Any:
        """Page numbers, identities or handles, where this ledger's engine has them."""
        return (
            list(values) if self.kind == "host" else torch.tensor(list(values), dtype=torch.int64, device=self.device)
        )

    def do(self, event: str, *arguments: Any, **options: Any) -> None:
        """`do("claim", [1, 2], [7, 7], "b")`: every list goes to where the engine has it."""
        place = lambda value: self.array(value) if isinstance(value, list) else value  # noqa: E731
        getattr(self.ledger, event)(
            *(place(argument) for argument in arguments), **{key: place(value) for key, value in options.items()}
        )

    def apply(self) -> Ledger:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # it looks on a stream of its own
        while not self.ledger.catch_up(seconds=1):
            pass
        return self.ledger

    def row(self, page: int) -> LedgerRow:
        return self.apply().row(page)

    def states(self) -> list[int]:
        return self.apply().states(0, self.ledger.pages).tolist()

    def generations(self) -> list[int]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.ledger.generations(np.arange(self.ledger.pages)).tolist()

    def violations(self) -> list[Violation]:
        return self.apply().take_violations()

    def wrong(self) -> set[tuple[Reason, int]]:
        """(reason, page) of the violations since the last look."""
        return {(violation.reason, violation.page) for violation in self.violations()}

    def work(self) -> list[Work]:
        self.apply()
        taken = []
        while (work := self.ledger.take_work()) is not None:
            taken.append(work)
        return taken
