"""A synthetic engine: sequences that decode, complete pages, end and begin anew, told to a ledger as an adapter would.

Runs on the measuring thread, which plays the engine's. Every step is the same amount of work as far as possible:
sequences are staggered, so that one in `PAGE_TOKENS` completes a page in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Any

import torch

from kv_canary.gate import EngineGate
from kv_canary.identity import Prefix
from kv_canary.identity_kernel import compiled_extend_each
from kv_canary.ledger import Ledger, TensorLedger

PAGE_TOKENS = 16
MAXIMUM_SEQUENCE_PAGES = 32
_VOCABULARY = 32_000


@dataclass(slots=True)
class _Sequence:
    name: str
    handle: int
    length: int = 0
    pages: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prefix: Prefix = field(default_factory=Prefix.empty)


class SyntheticEngine:
    """`sequences` that decode one token a step over a pool of `pages` pages. Implements `EnginePort`."""

    def __init__(self, ledger: Ledger, gate: EngineGate, *, pages: int, sequences: int) -> None:
        self._ledger = ledger
        self._gate = gate
        self._extend_each = compiled_extend_each()
        self._pages = pages
        self._names = count(1)
        self._device = ledger.device if isinstance(ledger, TensorLedger) else None
        self._sequence_pages = max(2, min(MAXIMUM_SEQUENCE_PAGES, pages // sequences - 1))
        self._free = list(range(pages))
        self._sequences = [self._new() for _ in range(sequences)]
        for index, sequence in enumerate(self._sequences):
            # staggered within a page, and in how long they have left
            whole = index * self._sequence_pages // max(1, sequences)
            sequence.length = whole * PAGE_TOKENS + index % PAGE_TOKENS
            sequence.pages = [self._free.pop() for _ in range(whole + (sequence.length % PAGE_TOKENS > 0))]
            sequence.tokens = [self._token(sequence, position) for position in range(sequence.length % PAGE_TOKENS)]

    def resync(self) -> None:
        self._ledger.reset()
        for sequence in self._sequences:
            whole = sequence.length // PAGE_TOKENS
            if sequence.pages[:whole]:
                self._ledger.adopt(self._numbers(sequence.pages[:whole]), 0, self._owner(sequence))
            if sequence.pages[whole:]:
                self._ledger.allocate(self._numbers(sequence.pages[whole:]), self._owner(sequence))
        self._ledger.free(self._numbers(self._free))

    def quarantine(self, space: str, page: int) -> str:
        return "quarantine: this engine has no prefix cache"

    def _owner(self, sequence: _Sequence) -> str | int:
        """An engine with device tables names its requests by number."""
        return sequence.name if self._device is None else sequence.handle

    def step_begins(self) -> float:
        """Everything up to the launch; returns the seconds that the canary took of it."""
        ledger = self._ledger
        started = perf_counter()
        self._gate.boundary(self)  # before the engine changes its tables: a resync reads them
        seconds = perf_counter() - started
        # the engine's own work: who gets a page, what the step writes
        fresh = [sequence for sequence in self._sequences if sequence.length % PAGE_TOKENS == 0]
        for sequence in fresh:
            sequence.pages.append(self._free.pop())
        given = [(self._numbers(sequence.pages[-1:]), self._owner(sequence)) for sequence in fresh]
        pages = self._numbers([sequence.pages[-1] for sequence in self._sequences])
        owners: Any = [self._owner(sequence) for sequence in self._sequences]
        if self._device is not None:
            owners = self._numbers(owners)
        started = perf_counter()
        if self._gate.recording:
            ledger.step()
            for page, owner in given:
                ledger.allocate(page, owner)
            ledger.write(pages, owners)
        return seconds + perf_counter() - started

    def step_ends(self) -> float:
        """Everything after the results are there; returns the seconds that the canary took of it."""
        ledger, complete = self._ledger, []
        for sequence in self._sequences:
            sequence.tokens.append(self._token(sequence, sequence.length))
            sequence.length += 1
            if sequence.length % PAGE_TOKENS == 0:
                complete.append(sequence)
        ended = [sequence for sequence in complete if len(sequence.pages) >= self._sequence_pages]
        sealed = self._numbers([sequence.pages[-1] for sequence in complete])
        left = [(self._numbers(sequence.pages), self._owner(sequence)) for sequence in ended]
        started = perf_counter()
        if complete and self._gate.recording:
            prefixes, identities = self._extend_each([s.prefix for s in complete], [s.tokens for s in complete])
            for sequence, prefix in zip(complete, prefixes, strict=True):
                sequence.prefix = prefix
            ledger.seal(sealed, identities)
        if self._gate.recording:
            for pages, owner in left:
                ledger.release(pages, owner)
                ledger.free(pages)
        seconds = perf_counter() - started
        for sequence in complete:
            sequence.tokens.clear()
        for sequence in ended:
            self._free[:0] = sequence.pages  # to the back: a page is used again as late as possible
            self._sequences[self._sequences.index(sequence)] = self._new()
        return seconds

    def _new(self) -> _Sequence:
        number = next(self._names)
        return _Sequence(f"request-{number}", number)

    def _token(self, sequence: _Sequence, position: int) -> int:
        return (sequence.handle * 7919 + position * 104_729) % _VOCABULARY

    def _numbers(self, values: Sequence[int]) -> Any:
        """Page numbers in the form in which this ledger's engine has them."""
        return list(values) if self._device is None else torch.tensor(values, dtype=torch.int64, device=self._device)
