"""`kv-canary demo`: a real transformers continuous-batching engine under live traffic, guarded."""

from __future__ import annotations

import signal
import threading


def main(arguments: list[str]) -> int:
    """Runs the demo; returns the exit status (0 clean, 1 mismatch found, 2 wrong use)."""
    stop = threading.Event()
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # before the long imports, so that a stop is a clean one from here on
        signal.signal(number, lambda *_: stop.set())
    from kv_canary_transformers.demo.run import run

    return run(arguments, stop)
