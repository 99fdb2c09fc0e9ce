"""The `kv-canary` command: a client of the control API, quick to start: no torch, fastapi or numba."""

from kv_canary.cli.program import main

__all__ = ["main"]
