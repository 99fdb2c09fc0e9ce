"""Builders of snapshots and their parts: a plausible value for every field, and overrides for what a test is about."""

from __future__ import annotations

from typing import Any

from kv_canary.settings import Settings
from kv_canary.snapshot import (
    PAGE_STATES,
    PURPOSES,
    SWEEP_DURATION_BUCKETS,
    Drill,
    GroupCounters,
    GroupSnapshot,
    Incident,
    Snapshot,
    StripeFinding,
    SweepProgress,
    SweepRequest,
    UncoveredBuffer,
)

NOW = 1_700_000_000.0
"""The moment at which all snapshots were taken, unless a test says otherwise."""


def make_uncovered(**overrides: Any) -> UncoveredBuffer:
    return UncoveredBuffer(**{"name": "rope_table", "reason": "not part of a page"} | overrides)


def make_finding(**overrides: Any) -> StripeFinding:
    values = {
        "stripe": 0,
        "name": "layer 3 K",
        "layers": (3,),
        "expected": "00000000000000aa",
        "found": "00000000000000ab",
    }
    return StripeFinding(**values | overrides)


def make_incident(number: int = 1, **overrides: Any) -> Incident:
    values: dict[str, Any] = {
        "id": f"incident-{number}",
        "source": "real",
        "group": "full",
        "page": 40 + number,
        "check": "content",
        "persistence": "persistent",
        "stripes": (make_finding(),),
        "layers": (3,),
        "page_state": "sealed",
        "owner": "request-7",
        "previous_owner": None,
        "owners": 1,
        "last_good_at": NOW - 30,
        "found_at": NOW - 10,
        "engine_step": 1200,
        "changed_step": 1100,
        "cause": "unknown",
        "summary": "page changed after its seal",
        "reaction": "log",
    }
    return Incident(**values | overrides)


def make_drill(**overrides: Any) -> Drill:
    values: dict[str, Any] = {
        "id": "drill-1",
        "kind": "fingerprint",
        "group": "full",
        "automatic": False,
        "alert": False,
        "result": "running",
        "started_at": NOW - 1,
    }
    return Drill(**values | overrides)


def make_sweep(**overrides: Any) -> SweepRequest:
    values: dict[str, Any] = {
        "id": "sweep-1",
        "groups": ("full",),
        "state": "running",
        "started_at": NOW - 2,
        "finished_at": None,
        "scanned_pages": 25,
        "verified_pages": 20,
        "total_pages": 100,
        "mismatches": 0,
    }
    return SweepRequest(**values | overrides)


def make_progress(**overrides: Any) -> SweepProgress:
    values: dict[str, Any] = {
        "position": 10,
        "total": 100,
        "started_at": NOW - 5,
        "eta_seconds": 45.0,
        "last_finished_at": None,
        "last_duration_seconds": None,
        "deadline_met": True,
    }
    return SweepProgress(**values | overrides)


def make_counters(**overrides: Any) -> GroupCounters:
    """Totals of a group to which nothing has happened yet."""
    values: dict[str, Any] = {
        "mismatches": {},
        "read_bytes": dict.fromkeys(PURPOSES, 0),
        "verified_pages": 0,
        "sealed_pages": 0,
        "claims": 0,
        "claims_not_covered": 0,
        "superseded": 0,
        "sweeps": {},
        "sweep_duration_buckets": (0,) * (len(SWEEP_DURATION_BUCKETS) + 1),
        "sweep_duration_sum": 0.0,
    }
    return GroupCounters(**values | overrides)


def make_group(name: str = "full", **overrides: Any) -> GroupSnapshot:
    values: dict[str, Any] = {
        "name": name,
        "kind": "full",
        "enabled": True,
        "disabled_reason": None,
        "total_pages": 100,
        "pages": dict.fromkeys(PAGE_STATES, 0) | {"sealed": 60, "free": 40},
        "bytes_per_page": 65536,
        "buffers": 8,
        "stripes": 8,
        "coverage": "all",
        "uncovered": (),
        "layout_signature": "0123456789abcdef",
        "kv_token_id_vs_position_offset": 0,
        "sweep": make_progress(),
        "oldest_verification_age_seconds": 12.0,
        "counters": make_counters(),
    }
    return GroupSnapshot(**values | overrides)


def make_snapshot(**overrides: Any) -> Snapshot:
    """A sidecar that runs, is switched on and has one group."""
    values: dict[str, Any] = {
        "version": "0.1.0",
        "engine": "transformers",
        "engine_version": "5.18.0",
        "device": "cpu",
        "pid": 4242,
        "rank": 0,
        "url": "http://127.0.0.1:10470",
        "started_at": NOW - 3600,
        "tick_at": NOW,
        "tick_monotonic": overrides.get("tick_at", NOW),
        "state": "running",
        "reason": None,
        "enabled": True,
        "settings": Settings(enabled=True),
        "engine_step": 1234,
        "groups": (make_group(),),
        "uncovered": (),
        "incidents": (),
        "incidents_total": len(overrides.get("incidents", ())),
        "sweeps": (),
        "drills": (),
        "drills_total": {},
        "errors": {},
        "last_errors": (),
        "kernel_seconds": {},
        "hook_seconds": {},
        "memory_bytes": {"ledger": 4096, "fingerprints": 8192},
        "budget_bytes_per_second": 2e8,
        "read_bandwidth_bytes_per_second": 2e10,
    }
    return Snapshot(**values | overrides)
