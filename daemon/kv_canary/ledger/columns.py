"""The columns by which a device decides for itself whether a page may be read."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PageColumns:
    """Of a ledger that lives on a device; written by the engine's stream, read only for everybody else."""

    state: torch.Tensor  # uint8 [pages]
    generation: torch.Tensor  # int64 [pages], the live one

    @property
    def device(self) -> torch.device:
        return self.generation.device
