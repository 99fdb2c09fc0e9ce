"""A soak: an engine under pressure for a long time, with a fault now and then. `python -m kv_canary.faults.soak`.

Prints progress to standard error and one JSON line at the end: pages verified, alarms (must be none), faults injected
and found (must be as many), the worst time that a detection took, and how memory grew. Exit status 0 if all is as it
must be.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kv_canary.commands import SetEnabled
from kv_canary.faults.soaked import Rig
from kv_canary.snapshot import Snapshot

FAULT_SECONDS = 2.0
TOGGLE_SECONDS = 30.0
DETECTION_SECONDS = 30.0
WARM_SHARE = 0.2  # of the time: memory is measured from here on


@dataclass(slots=True)
class _Tally:
    injected: int = 0
    found: int = 0
    worst_seconds: float = 0.0
    toggles: int = 0


def soak(rig: Rig, seconds: float, *, seed: int = 0, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Runs for so long and returns the document."""
    choose, tally = random.Random(seed), _Tally()
    started = time.monotonic()
    next_fault, next_toggle, next_line = started + FAULT_SECONDS, started + TOGGLE_SECONDS, started + 5.0
    memory: list[tuple[float, int]] = []
    while (now := time.monotonic()) < started + seconds:
        time.sleep(min(0.25, max(0.0, started + seconds - now)))
        now = time.monotonic()
        if now - started >= WARM_SHARE * seconds:
            memory.append((now, _resident_bytes()))
        if now >= next_fault:
            _inject(rig, choose, tally)
            next_fault = time.monotonic() + FAULT_SECONDS
        if now >= next_toggle:
            for enabled in (False, True):
                rig.sidecar.submit(SetEnabled(enabled=enabled)).result(10)
                time.sleep(0.2)
            tally.toggles += 1
            next_toggle = time.monotonic() + TOGGLE_SECONDS
        if now >= next_line:
            say(_line(rig, tally, now - started, seconds))
            next_line += max(5.0, seconds / 60)
    lasted = time.monotonic() - started
    with rig.paused():
        last = rig.sidecar.settle(30)
    rig.stop()
    return _document(rig, tally, last, lasted, memory)


def _inject(rig: Rig, choose: random.Random, tally: _Tally) -> None:
    with rig.paused():
        rig.sidecar.settle(30)  # whatever is complete has its fingerprint: from here on a change is nobody's right
        before = _real(rig.sidecar.snapshot())
        spoiled = rig.spoil(choose)
        if spoiled is None:
            return
        tally.injected += 1
        began = time.monotonic()
        while time.monotonic() - began < DETECTION_SECONDS:
            snapshot = rig.sidecar.snapshot()
            if _real(snapshot) > before:
                newest = snapshot.incidents[-1]
                if spoiled.page in (newest.page, *newest.neighbours) and newest.check == spoiled.check:
                    tally.found += 1
                break
            time.sleep(0.001)
        tally.worst_seconds = max(tally.worst_seconds, time.monotonic() - began)
        # between two readings of a page, or it would be seen as wrong once and right the next time, as it is
        rig.sidecar.suspend("mend", 10.0)
        spoiled.mend()
        rig.sidecar.resume("mend")


def _real(snapshot: Snapshot) -> int:
    return sum(
        count
        for group in snapshot.groups
        for (_, _, source), count in group.counters.mismatches.items()
        if source == "real"
    )


def _total(snapshot: Snapshot, counter: str) -> int:
    return sum(getattr(group.counters, counter) for group in snapshot.groups)


def _line(rig: Rig, tally: _Tally, passed: float, seconds: float) -> str:
    snapshot = rig.sidecar.snapshot()
    verified = _total(snapshot, "verified_pages")
    alarms = _real(snapshot) - tally.found
    return (
        f"{rig.name}: {passed:.0f} of {seconds:.0f} s, {verified:,} pages verified, "
        f"{_total(snapshot, 'superseded'):,} superseded, {tally.found} of {tally.injected} faults found, "
        f"{alarms} alarms"
    )


def _document(
    rig: Rig, tally: _Tally, snapshot: Snapshot, lasted: float, memory: list[tuple[float, int]]
) -> dict[str, Any]:
    alarms = _real(snapshot) - tally.found
    missed = sum(count for (_, result), count in snapshot.drills_total.items() if result == "missed")
    return {
        "engine": rig.name,
        "seconds": round(lasted, 1),
        **rig.work_done(),
        "verified_pages": _total(snapshot, "verified_pages"),
        "sealed_pages": _total(snapshot, "sealed_pages"),
        "superseded": _total(snapshot, "superseded"),
        "transfers": {
            result: sum(group.counters.transfers.get(result, 0) for group in snapshot.groups)
            for result in ("verified", "mismatch", "skipped")
        },
        "alarms": alarms,
        "faults_injected": tally.injected,
        "faults_found": tally.found,
        "worst_detection_seconds": round(tally.worst_seconds, 4),
        "switched_off_and_on": tally.toggles,
        "drills_missed": missed,
        "errors": dict(snapshot.errors),
        "resident_bytes": memory[-1][1] if memory else _resident_bytes(),
        "resident_slope_bytes_per_hour": _slope(memory),
        "passed": not alarms and tally.found == tally.injected and not missed and not snapshot.errors,
    }


def _resident_bytes() -> int:
    """Of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _slope(samples: list[tuple[float, int]]) -> int:
    """Bytes an hour by least squares."""
    if len(samples) < 3:
        return 0
    times, sizes = np.array(samples, np.float64).T
    return int(np.polyfit(times - times[0], sizes, 1)[0] * 3600)


def main(arguments: list[str] | None = None, make_rig: Callable[[int], Rig] | None = None) -> int:
    parser = argparse.ArgumentParser(description="An engine under pressure for a long time, with a fault now and then.")
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long (3600)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is random, as far as threads let it be")
    given = parser.parse_args(arguments)
    if make_rig is None:
        from kv_canary.faults.rig import HarnessRig

        make_rig = HarnessRig
    logging.getLogger("kv_canary").setLevel(logging.CRITICAL)  # alarms are what is wanted here
    rig = make_rig(given.seed)
    try:
        document = soak(rig, given.seconds, seed=given.seed, say=lambda line: print(line, file=sys.stderr, flush=True))
    finally:
        rig.sidecar.stop()
    print(json.dumps(document), flush=True)
    return 0 if document["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
