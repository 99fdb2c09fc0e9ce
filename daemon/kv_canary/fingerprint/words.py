"""64-bit words in torch operations: unsigned arithmetic on int64 tensors, on any device."""

from __future__ import annotations

import torch


def logical_shift(values: torch.Tensor, bits: int) -> torch.Tensor:
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def signed(value: int) -> int:
    """The int64 with the bits of an unsigned `value`."""
    return value - (1 << 64) if value >> 63 else value


def splitmix(values: torch.Tensor) -> torch.Tensor:
    """`identity.splitmix64`, elementwise on int64."""
    z = values + signed(0x9E3779B97F4A7C15)
    z = (z ^ logical_shift(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ logical_shift(z, 27)) * signed(0x94D049BB133111EB)
    return z ^ logical_shift(z, 31)
