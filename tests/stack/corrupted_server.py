"""A guarded engine under traffic, in whose cache SIGUSR1 flips one bit of a sealed page. SIGTERM ends it.

Usage: corrupted_server.py FOLDER. Writes FOLDER/ready.json once pages are verified, and FOLDER/flipped.json
(`{"page": ...}`) once the canary has seen the flipped bit and the engine goes on.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kv_canary import Budget, Settings
from kv_canary.sidecar import Sidecar
from kv_canary_transformers import attach
from kv_canary_transformers.demo.engine import build_manager, build_model
from kv_canary_transformers.demo.report import real_mismatches, write_json
from kv_canary_transformers.demo.traffic import Traffic

PAGES = 96


def main(folder: Path) -> None:
    flip, stop = threading.Event(), threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: flip.set())
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    manager = build_manager(build_model(), pages=PAGES)
    sidecar = attach(manager, Settings(port=0, budget=Budget(share=0.05)), seed=0)
    traffic = Traffic(manager, PAGES)

    def pump_until(condition: Callable[[], bool]) -> None:
        while not condition() and not stop.is_set():
            traffic.pump()

    def verified() -> int:
        return sum(group.counters.verified_pages for group in sidecar.snapshot().groups)

    try:
        manager.start()
        pump_until(lambda: verified() > 10 * PAGES)
        write_json(folder / "ready.json", {"url": sidecar.snapshot().url})
        pump_until(flip.is_set)
        if flip.is_set():
            with manager.pause():  # no step may take the page between choosing it and the canary's next look at it
                page = flip_a_bit_of_a_sealed_page(manager, sidecar)
            write_json(folder / "flipped.json", {"page": page})
        pump_until(stop.is_set)
    finally:
        if manager.is_running():
            manager.stop(block=True, timeout=10, hard_stop=True)
        sidecar.detach()


def flip_a_bit_of_a_sealed_page(manager: Any, sidecar: Sidecar) -> int:
    sidecar.settle()
    allocator = manager.batch_processor.cache.cache_allocators["full_attention"]
    page = next(iter(allocator.ledger.block_to_hash))  # complete, and found by its hash: sealed
    allocator._copy_view[page, 1234] ^= 16  # the cache tensor as bytes, one page a row
    deadline = time.monotonic() + 10
    while not real_mismatches(sidecar.snapshot()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the flipped bit of page {page} was not found")
        time.sleep(0.01)
    return int(page)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
