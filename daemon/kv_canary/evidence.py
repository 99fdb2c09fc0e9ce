"""What the bytes of a page that is wrong say about it: rows of zeros, numbers that are none, one flipped bit.

Used by the canary thread, for confirmed findings only: reading a page takes some microseconds, and there are few. What
is looked at are the very bytes of the finding: they have its fingerprint, and the page has its generation before and
after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kv_canary.findings import Finding
from kv_canary.fingerprint.algebra import fingerprint_of, single_flips
from kv_canary.geometry import WORD, PageBuffer, Stripe
from kv_canary.verifier import Verifier

LOOK_STRIPES = 4
LOOK_BYTES = 4 << 20  # of one stripe

U64Array = npt.NDArray[np.uint64]

# Where all of these bits are set, the number is none (or infinite); (bytes of a number, bits)
_EXPONENTS: dict[torch.dtype, tuple[type[np.unsignedinteger], int]] = {
    torch.float32: (np.uint32, 0x7F800000),
    torch.bfloat16: (np.uint16, 0x7F80),
    torch.float16: (np.uint16, 0x7C00),
    torch.float8_e5m2: (np.uint8, 0x7C),
    torch.float8_e4m3fn: (np.uint8, 0x7F),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """One bit: byte `byte` of token row `row` of a buffer (of the page, if it has no rows)."""

    buffer: str
    layer: int
    row: int
    byte: int
    bit: int

    def __str__(self) -> str:
        place = f"buffer {self.buffer}, layer {self.layer}, token row {self.row}, byte {self.byte}, bit {self.bit}"
        return f"bit flip: one bit, {place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was seen; `rows` texts name buffers and token rows."""

    flip: Flip | None = None
    zero_rows: tuple[str, ...] = ()
    not_finite: tuple[str, ...] = ()


def look_at(finding: Finding, verifier: Verifier, breathe: Callable[[], None] = lambda: None) -> Evidence:
    """The evidence of a finding's bytes; none when they are others by now."""
    zero_rows: list[str] = []
    not_finite: list[str] = []
    flip = None
    for stripe_index, expected, found in zip(
        finding.stripes[:LOOK_STRIPES], finding.expected, finding.found, strict=False
    ):
        stripe = verifier.group.stripes[stripe_index]
        if stripe.bytes_per_page > LOOK_BYTES:
            continue
        words = _words(finding, verifier, stripe_index, found, breathe)
        if words is None:
            continue
        if len(finding.stripes) == 1 and finding.persistence == "persistent":
            flip = _flip(stripe, words, expected, found, breathe)
        for buffer, part in _buffers(stripe, words):
            zero_rows += _zero_rows(buffer, part)
            not_finite += _not_finite(buffer, part)
        breathe()
    if flip is not None and not _neighbours_are_right(finding, verifier):
        flip = None  # a stroke that went over more than this page is no flip, however well the numbers fit
    return Evidence(flip=flip, zero_rows=tuple(zero_rows), not_finite=tuple(not_finite))


def _words(
    finding: Finding, verifier: Verifier, stripe: int, found: int, breathe: Callable[[], None]
) -> U64Array | None:
    page = np.array([finding.page])
    if verifier.ledger.generations(page)[0] != finding.generation:
        return None
    words = verifier.table.words(finding.page, stripe)
    if fingerprint_of(words, verifier.group.stripes[stripe].bytes_per_page, breathe) != found:
        return None
    return words if verifier.ledger.generations(page)[0] == finding.generation else None


def _buffers(stripe: Stripe, words: U64Array) -> list[tuple[PageBuffer, npt.NDArray[np.uint8]]]:
    """The stripe's buffers with their logical bytes."""
    parts, first = [], 0
    for buffer in stripe.buffers:
        raw = words[first : first + buffer.words].view(np.uint8)[: buffer.bytes_per_page]
        parts.append((buffer, raw))
        first += buffer.words
    return parts


def _flip(stripe: Stripe, words: U64Array, expected: int, found: int, breathe: Callable[[], None]) -> Flip | None:
    hits = single_flips(words, expected, found, stripe.bytes_per_page, breathe)
    if len(hits) != 1:
        return None
    ((word, bit),) = hits
    for buffer in stripe.buffers:
        if word < buffer.words:
            byte = word * WORD + bit // 8
            if byte >= buffer.bytes_per_page:
                return None  # in the padding, which is not memory
            row = _row_bytes(buffer)
            return Flip(buffer=buffer.name, layer=buffer.layer, row=byte // row, byte=byte % row, bit=bit % 8)
        word -= buffer.words
    return None


def _neighbours_are_right(finding: Finding, verifier: Verifier) -> bool:
    """The pages before and behind, as far as there is something to hold them against."""
    around = [page for page in (finding.page - 1, finding.page + 1) if 0 <= page < verifier.group.pages]
    pages = np.array([page for page in around if verifier.is_valid(page)], np.int64)
    if not len(pages):
        return True
    generations = verifier.ledger.generations(pages)
    rows = verifier.table.verify(pages).rows
    stable = verifier.ledger.generations(pages) == generations
    return not stable[rows].any()


def _zero_rows(buffer: PageBuffer, raw: npt.NDArray[np.uint8]) -> list[str]:
    size = _row_bytes(buffer)
    zero: npt.NDArray[np.bool_] = np.logical_not(raw.reshape(-1, size).any(axis=1))
    rows = np.flatnonzero(zero)
    if not len(rows) or (len(rows) == len(zero) and len(zero) == 1):
        return []
    return [f"{_ranges(rows)} of {buffer.name}"]


def _not_finite(buffer: PageBuffer, raw: npt.NDArray[np.uint8]) -> list[str]:
    if buffer.dtype not in _EXPONENTS:
        return []
    number, bits = _EXPONENTS[buffer.dtype]
    size = np.dtype(number).itemsize
    if len(raw) % size or _row_bytes(buffer) % size:
        return []
    numbers = raw.view(number)
    bad = (numbers & number(bits)) == number(bits)
    rows = np.flatnonzero(bad.reshape(-1, _row_bytes(buffer) // size).any(axis=1))
    return [f"{_ranges(rows)} of {buffer.name}"] if len(rows) else []


def _row_bytes(buffer: PageBuffer) -> int:
    row = buffer.row_bytes or buffer.bytes_per_page
    return row if buffer.bytes_per_page % row == 0 else buffer.bytes_per_page


def _ranges(rows: npt.NDArray[np.int64]) -> str:
    """`row 3`, `rows 0-4, 7`."""
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:4]]
    more = ", ..." if len(runs) > 4 else ""
    return f"row{'s' * (len(rows) > 1)} {', '.join(texts)}{more}"
