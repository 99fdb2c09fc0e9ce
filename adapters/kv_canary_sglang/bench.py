"""A peer for `kv-canary bench`: what SGLang's in-tree canary computes over a row where it has no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

SAMPLE_BYTES = 16 << 10  # it goes byte by byte through Python


def reference(pieces: Sequence[memoryview]) -> Callable[[], int]:
    """Hashes the first bytes of each piece, 16 KiB in all, and returns how many they were.

    Raises `ImportError` where SGLang is not installed, or has no such function any more.
    """
    from sglang.kernels.ops.kv_canary.verify_ref import _splitmix64_fold_bytes_scalar as fold

    each = max(16, SAMPLE_BYTES // len(pieces))
    rows = [list(bytes(piece[:each])) for piece in pieces]

    def hash_rows() -> int:
        for row in rows:
            fold(raw_bytes=row)
        return sum(map(len, rows))

    return hash_rows
