"""`kv-canary demo`: a real transformers continuous-batching engine under live traffic, guarded."""

from __future__ import annotations


def main(arguments: list[str]) -> int:
    """Runs the demo; returns the exit status (0 clean, 1 mismatch found, 2 wrong use)."""
    from kv_canary_transformers.demo.run import run

    return run(arguments)
