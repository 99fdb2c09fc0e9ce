"""The seam between the state machine and the place where page numbers live: numpy arrays or torch tensors.

Both index alike (`column[pages]`, `column[pages] = value`); the few operations that differ are here.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch


class Arrays(Protocol):
    """Array operations; none of them waits for a device."""

    def zeros(self, count: int, dtype: str) -> Any: ...

    def pages(self, pages: Any) -> Any:
        """An int64 array of page numbers that nobody else changes."""

    def where(self, mask: Any, left: Any, right: Any) -> Any: ...

    def add_at(self, column: Any, pages: Any, amount: int) -> None:
        """`column[p] += amount` for every p in pages, a page as often as it occurs."""


class HostArrays:
    """numpy."""

    def zeros(self, count: int, dtype: str) -> Any:
        return np.zeros(count, dtype)

    def pages(self, pages: Any) -> Any:
        return np.array(pages, np.int64)

    def where(self, mask: Any, left: Any, right: Any) -> Any:
        return np.where(mask, left, right)

    def add_at(self, column: Any, pages: Any, amount: int) -> None:
        np.add.at(column, pages, amount)


class TensorArrays:
    """torch, on the pool's device and on the caller's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, count: int, dtype: str) -> Any:
        return torch.zeros(count, dtype=getattr(torch, dtype), device=self.device)

    def pages(self, pages: Any) -> Any:
        # a copy: the engine's index may be a view of a table that it goes on to change
        return torch.as_tensor(pages, device=self.device).to(torch.int64, copy=True).flatten()

    def where(self, mask: Any, left: Any, right: Any) -> Any:
        return torch.where(mask, left, right)

    def add_at(self, column: Any, pages: Any, amount: int) -> None:
        column.index_add_(0, pages, torch.full(pages.shape, amount, dtype=column.dtype, device=pages.device))
