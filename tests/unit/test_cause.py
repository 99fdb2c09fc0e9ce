"""The guess at a cause: what it says for each kind of damage, and that it says nothing without evidence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from builders.harness import Harness
from kv_canary.cause import guess_cause
from kv_canary.findings import Finding
from kv_canary.fingerprint.backends import open_table
from kv_canary.geometry import build_group, contiguous_buffer
from kv_canary.verifier import Verifier

LAYER = 4096  # bytes of a page and layer in the harness: 16 token rows of 256 bytes


def cause_of(harness: Harness, page: int | None = None, **options: Any) -> str:
    findings = [finding for finding in harness.sweep() if page in (None, finding.page)]
    return guess(harness, findings[0], **options)


def guess(harness: Harness, finding: Finding, **options: Any) -> str:
    row, step = harness.ledger.row(finding.page), harness.ledger.engine_step
    return guess_cause(finding, harness.verifier, row, step, **options).text


@pytest.fixture
def harness() -> Harness:
    harness = Harness()
    harness.sealed(*range(32))
    return harness


@pytest.mark.parametrize(
    ("byte", "mask", "place"),
    [
        (0, 1, "buffer layer.0, layer 0, token row 0, byte 0, bit 0"),
        (256 + 7, 128, "buffer layer.0, layer 0, token row 1, byte 7, bit 7"),
        (LAYER + 15 * 256 + 255, 16, "buffer layer.1, layer 1, token row 15, byte 255, bit 4"),
    ],
)
def test_one_flipped_bit_is_placed(harness: Harness, byte: int, mask: int, place: str) -> None:
    harness.flip(5, byte, mask)
    assert cause_of(harness) == f"bit flip: one bit, {place}"


def test_two_bits_are_not_called_a_flip(harness: Harness) -> None:
    harness.flip(5, 7, 128)
    harness.flip(5, 800, 128)
    assert cause_of(harness) == "unknown"


@pytest.mark.parametrize("other", [4, 6])
def test_a_flip_is_not_claimed_when_a_neighbour_is_wrong_too(harness: Harness, other: int) -> None:
    harness.flip(5)
    harness.flip(other)
    assert cause_of(harness, page=5) == "unknown"


def test_a_flip_is_not_claimed_when_another_stripe_is_wrong_too(harness: Harness) -> None:
    harness.flip(5, 0)
    harness.flip(5, LAYER)
    assert cause_of(harness) == "unknown"


def test_a_flip_is_claimed_beside_pages_that_nobody_holds_a_fingerprint_of() -> None:
    harness = Harness()
    harness.sealed(5)
    harness.flip(5)
    assert cause_of(harness).startswith("bit flip")


def test_a_writer_that_goes_on_is_no_flip(harness: Harness) -> None:
    harness.flip(5)
    (finding,) = harness.sweep()
    harness.flip(5, 9)
    assert guess(harness, finding) == "unknown", "the bytes are others by now"


def test_a_page_that_moves_on_is_not_looked_at(harness: Harness) -> None:
    harness.flip(5)
    (finding,) = harness.sweep()
    harness.ledger.reopen([5])
    assert guess(harness, finding) == "unknown"


def test_a_changing_page_has_a_writer(harness: Harness) -> None:
    harness.flip(5)
    table = harness.verifier.table
    first = table.verify

    def verify_and_write(pages: Any) -> Any:
        found = first(pages)
        harness.memory[5, 3000:3400] ^= 0x55
        return found

    table.verify = verify_and_write  # type: ignore[method-assign]
    assert cause_of(harness) == "a writer is active"


@pytest.mark.parametrize(("rows", "text"), [([3], "row 3"), ([0, 1, 2, 9], "rows 0-2, 9")])
def test_rows_of_zeros_are_named(harness: Harness, rows: list[int], text: str) -> None:
    for row in rows:
        harness.memory[5, LAYER + 256 * row : LAYER + 256 * (row + 1)] = 0
    assert cause_of(harness) == f"zeros in {text} of layer.1"


def test_a_page_of_zeros_is_said_to_be_one(harness: Harness) -> None:
    harness.memory[5] = 0
    assert cause_of(harness) == "all zero"


def test_a_copy_of_another_page_is_named(harness: Harness) -> None:
    harness.memory[5] = harness.memory[9]
    assert cause_of(harness) == "now equals page 9 of group full (misdirected copy)"


def test_a_copy_from_another_group_of_the_same_shape_is_named(harness: Harness) -> None:
    from builders.harness import make_group, make_memory

    memory = make_memory(seed=8)
    group = make_group(memory, name="draft")
    other = Harness()
    other.verifier = Verifier(
        group, other.ledger, open_table(group), watch=other.gate.watch, monotonic=other.clock.monotonic
    )
    other.sealed(*range(32))
    harness.memory[5] = memory[11]
    assert cause_of(harness) == "unknown"
    assert cause_of(harness, others=[harness.verifier, other.verifier]) == (
        "now equals page 11 of group draft (misdirected copy)"
    )


def test_a_late_write_says_how_late_and_whose_page_it_was() -> None:
    harness = Harness()
    harness.sealed(5, owner="request-9")
    harness.ledger.release([5], "request-9")
    harness.ledger.free([5])
    for _ in range(3):
        harness.ledger.step()
    harness.apply()
    harness.memory[5, 100:200] ^= 0x3C
    assert cause_of(harness) == "written after it was freed 3 steps before; its last owner was request-9"
    harness.memory[5, :256] = 0
    assert cause_of(harness) == (
        "zeros in row 0 of layer.0; written after it was freed 3 steps before; its last owner was request-9"
    )


@pytest.mark.parametrize(
    ("dtype", "raw", "text"),
    [
        (torch.bfloat16, b"\xc0\x7f", "holds NaN or Inf now: row 2 of kv"),
        (torch.bfloat16, b"\x80\xff", "holds NaN or Inf now: row 2 of kv"),
        (torch.bfloat16, b"\x7f\x7f", "unknown"),  # the largest finite number
        (torch.float16, b"\x00\x7c", "holds NaN or Inf now: row 2 of kv"),
        (torch.float32, b"\x00\x00\x80\x7f", "holds NaN or Inf now: row 2 of kv"),
        (torch.float8_e5m2, b"\x7f", "holds NaN or Inf now: row 2 of kv"),
        (torch.float8_e4m3fn, b"\xff", "holds NaN or Inf now: row 2 of kv"),
        (torch.int8, b"\xff", "unknown"),
        (None, b"\xc0\x7f", "unknown"),
    ],
)
def test_numbers_that_are_none_are_named_where_the_buffer_says_what_it_holds(
    dtype: torch.dtype | None, raw: bytes, text: str
) -> None:
    harness = Harness(memory=torch.full((8, 512), 0x11, dtype=torch.uint8))
    buffer = contiguous_buffer("kv", 0, harness.memory, pages=8, page_stride=512, rows=8, row_bytes=64, dtype=dtype)
    group = build_group("full", "full", [buffer], coverage="all")
    harness.verifier = Verifier(
        group, harness.ledger, open_table(group), watch=harness.gate.watch, monotonic=harness.clock.monotonic
    )
    harness.sealed(*range(8))
    harness.memory[3, 2 * 64 : 2 * 64 + 8] = torch.from_numpy(np.frombuffer((raw * 8)[:8], np.uint8).copy())
    (finding,) = harness.verifier.verify(np.arange(8), "sweep")
    assert guess(harness, finding) == text
