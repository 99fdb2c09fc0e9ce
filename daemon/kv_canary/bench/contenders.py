"""What is measured against what: our passes over a pool, the memory's own limit, and peers, all on the same bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import entry_points

import numpy as np
import torch

from kv_canary.bench.presets import page_pieces
from kv_canary.bench.timing import Contender
from kv_canary.errors import KVCanaryError
from kv_canary.fingerprint.table import FingerprintTable, PageArray
from kv_canary.geometry import CanaryGroup

PEERS = "kv_canary.bench.peers"
PEER_BYTES = 256 << 20  # of the pool; a peer that is called from Python once a piece takes its time


def launches(group: CanaryGroup, launch_bytes: int) -> list[PageArray]:
    """All pages in address order, in windows of the size that the scrubber would launch."""
    count = max(1, launch_bytes // group.bytes_per_page)
    pages = np.arange(group.pages, dtype=np.int64)
    return [pages[start : start + count] for start in range(0, group.pages, count)]


def verify_pass(table: FingerprintTable, group: CanaryGroup, windows: Sequence[PageArray]) -> Contender:
    """Raises `KVCanaryError` when a page is found changed: then the figures are those of something else."""

    def verify() -> int:
        for pages in windows:
            if len(table.verify(pages).rows):
                raise KVCanaryError("a page changed while it was measured: this machine's memory cannot be trusted")
        return group.pages * group.bytes_per_page

    return verify


def seal_pass(table: FingerprintTable, group: CanaryGroup, windows: Sequence[PageArray]) -> Contender:
    def seal() -> int:
        for pages in windows:
            table.store(pages, table.read(pages))
        return group.pages * group.bytes_per_page

    return seal


def ceilings(memory: torch.Tensor) -> dict[str, Contender]:
    """The memory's own limit. CPU: `torch.sum` over int64 with torch's threads. CUDA: that, and a copy counted both
    ways; who is faster is the ceiling.
    """
    words = memory[: memory.numel() // 16 * 16].view(torch.int64)
    half = len(words) // 2

    def reduction() -> int:
        words.sum().item()
        return words.nbytes

    def copy() -> int:
        # the same bytes each time, so what was sealed after the first copy stays right
        words[half:].copy_(words[:half])
        torch.cuda.synchronize(words.device)
        return words.nbytes

    return {"reduction": reduction} if memory.device.type == "cpu" else {"reduction": reduction, "copy": copy}


def peers(group: CanaryGroup) -> dict[str, Contender]:
    """Other checksums on the CPU, those that are installed: XXH3-64 over every contiguous piece of a page, and what
    adapters bring from their engines.

    An entry point of the group `kv_canary.bench.peers` is a function `peer(pieces) -> contender`, where `pieces` are
    views of contiguous bytes; it raises `ImportError` where its engine is not installed.
    """
    if group.device.type != "cpu":
        return {}
    found = _xxh3(group)
    pieces = [_view(address, size) for address, size in page_pieces(group, range(1))]
    for point in entry_points(group=PEERS):
        with suppress(ImportError):
            found[point.name] = point.load()(pieces)
    return found


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address))


def _xxh3(group: CanaryGroup) -> dict[str, Contender]:
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError:
        return {}
    count = max(1, min(group.pages, PEER_BYTES // group.bytes_per_page))
    views = [_view(address, size) for address, size in page_pieces(group, range(count))]

    def xxh3() -> int:
        for view in views:
            xxh3_64_intdigest(view)
        return count * group.bytes_per_page

    return {"xxh3": xxh3}
