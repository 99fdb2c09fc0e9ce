"""What the demo says: a live line for people, a summary for programs."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from kv_canary.snapshot import Snapshot
from kv_canary_transformers.demo.traffic import Traffic


def real_mismatches(snapshot: Snapshot) -> int:
    """Confirmed mismatches that were no drills."""
    return sum(
        count
        for group in snapshot.groups
        for (_, _, source), count in group.counters.mismatches.items()
        if source == "real"
    )


def summary(snapshot: Snapshot, traffic: Traffic, seconds: float) -> dict[str, Any]:
    counters = [group.counters for group in snapshot.groups]
    return {
        "engine": snapshot.engine,
        "engine_version": snapshot.engine_version,
        "device": snapshot.device,
        "seconds": round(seconds, 3),
        "steps": snapshot.engine_step,
        "requests_finished": traffic.requests_finished,
        "requests_cancelled": traffic.requests_cancelled,
        "tokens_generated": traffic.tokens_generated,
        "claims": sum(c.claims for c in counters),
        "claims_not_covered": sum(c.claims_not_covered for c in counters),
        "pages_sealed": sum(c.sealed_pages for c in counters),
        "pages_verified": sum(c.verified_pages for c in counters),
        "read_bytes": sum(sum(c.read_bytes.values()) for c in counters),
        "sweeps_completed": sum(c.sweeps["clean"] + c.sweeps["mismatch"] for c in counters),
        "superseded": sum(c.superseded for c in counters),
        "incidents": real_mismatches(snapshot),
        "drills": {f"{kind}_{result}": count for (kind, result), count in snapshot.drills_total.items()},
        "errors": dict(snapshot.errors),
    }


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Whole or not at all: a reader never sees half a file."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(document, indent=2) + "\n")
    draft.replace(path)


class LiveLine:
    """One line that is rewritten in place on a terminal, or printed every five seconds elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._terminal = self._stream.isatty()
        self._interval = 0.5 if self._terminal else 5.0
        self._shown_at = time.monotonic()
        self._tokens = 0

    def show(self, snapshot: Snapshot, traffic: Traffic) -> None:
        elapsed = time.monotonic() - self._shown_at
        if elapsed < self._interval:
            return
        rate = (traffic.tokens_generated - self._tokens) / elapsed
        self._shown_at, self._tokens = time.monotonic(), traffic.tokens_generated
        groups = snapshot.groups
        sweeps = sum(g.counters.sweeps["clean"] + g.counters.sweeps["mismatch"] for g in groups)
        progress = max((g.sweep.position / max(1, g.sweep.total) for g in groups), default=0.0)
        line = (
            f"{rate:7.0f} tokens/s | {sum(g.counters.sealed_pages for g in groups):,} pages sealed | "
            f"{sum(sum(g.counters.read_bytes.values()) for g in groups) / 1e9:,.1f} GB verified | "
            f"{sweeps:,} sweeps + {progress:.0%} | {real_mismatches(snapshot)} mismatches"
        )
        self._stream.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        self._stream.flush()

    def close(self) -> None:
        if self._terminal:
            self._stream.write("\n")
