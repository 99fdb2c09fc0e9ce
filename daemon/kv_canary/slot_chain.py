"""The prefix hash of `identity`, kept for every token slot of a pool on the pool's own device.

An engine that keeps its page tables on the device never tells the host which tokens lie where. So the state of the
hash after a slot's token lies beside the slot, and the next token of the sequence is appended to it there: from the
tokens and positions that go into a step, not from what the engine's prefix cache says of them. Values equal those of
`identity.Prefix`, bit for bit.

Who writes what. The engine's thread appends, as operations on its current stream; nobody else touches the column. No
operation waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch

from kv_canary.fingerprint.words import signed, splitmix
from kv_canary.identity import MULTIPLIER, POSITION, Prefix

UNKNOWN_STATE = 0

_MULTIPLIER, _POSITION = signed(MULTIPLIER), signed(POSITION)
_INVERSE = pow(MULTIPLIER, -1, 1 << 64)


class SlotChain:
    """`state`: int64 [slots], of the hash after each slot's token; 0 where the tokens before it are not known."""

    def __init__(self, slots: int, device: torch.device, *, longest: int = 4096) -> None:
        """`longest`: tokens that one sequence may append at once before a larger table of powers is made."""
        self.state = torch.zeros(slots, dtype=torch.int64, device=device)
        self._device = device
        self._powers, self._inverses = _powers(longest, device)

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self._powers.nbytes + self._inverses.nbytes

    def forget(self) -> None:
        self.state.zero_()

    def append_one(
        self, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, before: torch.Tensor
    ) -> torch.Tensor:
        """One token for each sequence, all int64 [sequences]; `before` is the state ahead of it. Returns identities."""
        state = before * _MULTIPLIER + splitmix(tokens + 1)
        return self._keep(slots, state, before, positions)

    def append(
        self,
        slots: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        before: torch.Tensor,
        lengths: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        """Several tokens for each sequence: `slots`, `tokens` and `positions` are int64 [tokens], sequence after
        sequence, `before` and `lengths` int64 [sequences], `longest` no less than the largest length. Returns
        identities, int64 [tokens], 0 where the state before is not known.
        """
        if longest >= len(self._powers):
            self._powers, self._inverses = _powers(2 * longest, self._device)
        ends = torch.cumsum(lengths, 0)
        starts = ends - lengths
        places = torch.arange(len(slots), device=self._device)
        row = torch.searchsorted(ends, places, right=True)
        local = places - starts[row] + 1
        # h(s + n) = M^n * (h(s) + sum over i <= n of m(t_i) * M^-i): one running sum for all sequences together
        terms = splitmix(tokens + 1) * self._inverses[local]
        sums = torch.cumsum(terms, 0)
        ahead = torch.where(starts > 0, sums[(starts - 1).clamp_(min=0)], 0)
        known = before[row]
        state = self._powers[local] * (known + sums - ahead[row])
        return self._keep(slots, state, known, positions)

    def _keep(
        self, slots: torch.Tensor, state: torch.Tensor, before: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        known = before != UNKNOWN_STATE
        state = torch.where(known, state, UNKNOWN_STATE)
        self.state[slots] = state
        identities = splitmix(state ^ ((positions + 1) * _POSITION))
        identities += identities == 0  # 0 means that it is not known
        return torch.where(known, identities, 0)


def first_state(salt: int) -> int:
    """The state before a sequence's first token, as an int64."""
    return signed(Prefix.empty(salt).value)


def _powers(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """M^0 .. M^count and M^-0 .. M^-count."""
    base, inverse = np.full(count + 1, MULTIPLIER, np.uint64), np.full(count + 1, _INVERSE, np.uint64)
    base[0] = inverse[0] = 1
    with np.errstate(over="ignore"):
        powers = np.multiply.accumulate(base).view(np.int64), np.multiply.accumulate(inverse).view(np.int64)
    return torch.from_numpy(powers[0]).to(device), torch.from_numpy(powers[1]).to(device)
