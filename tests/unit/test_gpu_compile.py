"""The GPU kernels compile for every target we name and spill nothing, and the one that reads is short enough to run at
the memory's speed.

No GPU is needed: Triton's wheel carries the compilers and the disassembler. The budget: an H200 moves about 21 bytes a
clock for each multiprocessor, which issues four warp instructions a clock, so about 49 instructions a 64-bit word are
the memory's time.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "gpu" / "compile_kernels.py"
VARIANTS = {"fingerprint": 12, "settle": 1, "ledger": 12}


@functools.cache
def compiled(target: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, SCRIPT, target], capture_output=True, text=True, timeout=240, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_variant_compiles(target: str) -> None:
    rows = compiled(target)
    assert Counter(row["kernel"] for row in rows) == VARIANTS
    assert all(row["bytes"] > 1000 for row in rows)


def test_nothing_spills_on_sm_90() -> None:
    assert [row for row in compiled("sm_90") if row["stack_bytes"] or row["spills"]] == []


# (compares with the table, picks its pages of a range)
READINGS = [(False, False), (True, False), (True, True)]


def contiguous(verify: bool, by_range: bool) -> dict[str, Any]:
    """The inner loop of pages that lie in one run, aligned."""
    (row,) = [
        row
        for row in compiled("sm_90")
        if (row["kernel"], row.get("mode"), row.get("alignment")) == ("fingerprint", 0, 16)
        and (row["verify"], row["by_range"]) == (verify, by_range)
    ]
    return row


@pytest.mark.parametrize(("verify", "by_range"), READINGS)
def test_the_inner_loop_takes_at_most_16_instructions_a_word(verify: bool, by_range: bool) -> None:
    assert contiguous(verify, by_range)["instructions_per_word"] <= 16


@pytest.mark.parametrize(("verify", "by_range"), READINGS)
def test_aligned_pages_are_loaded_16_bytes_at_a_time(verify: bool, by_range: bool) -> None:
    loads = contiguous(verify, by_range)["loads"]
    assert all(".128" in load for load in loads)
    assert len(loads) >= 4
