"""Offload: requests that go to the CPU swap pool to make room, and come back. Runs on the engine's thread.

The engine frees a victim's blocks, copies them, and forgets them; later it allocates others and copies back, all in
the order of its stream. So a block is told as exported while it is free and its bytes are still there, the complete
ones are told as loaded before the copy back is launched, and admitted behind it. The last block of a request is open:
the next step writes it, so what came back in it is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kv_canary.errors import UnsupportedEngineError
from kv_canary.hooks import Hooks, expect_method
from kv_canary.ledger import Manifest
from kv_canary_transformers.recorder import Recorder

_Coming = list[tuple[Recorder, Any, list[int], Manifest]]

OPEN_BLOCK_REASON = "the open block of a request that comes back from the CPU is written by the next step: not compared"
UNKNOWN_REASON = "blocks offloaded to the CPU are not checked: this transformers offloads in a way that is not modelled"


class OffloadRecorder:
    """Manifests of the requests that are in the swap pool, by request and allocator."""

    def __init__(self, manager: Any, recorders: Sequence[Recorder]) -> None:
        self._manager = manager
        self._recorders = dict(zip(manager.cache.cache_allocators, recorders, strict=True))
        self._manifests: dict[str, dict[str, Manifest]] = {}

    @staticmethod
    def has_pool(manager: Any) -> bool:
        return getattr(manager, "_cpu_pool", None) is not None

    @staticmethod
    def is_modelled(manager: Any) -> bool:
        try:
            expect_method(manager, "_offload_to_cpu", ("victims", "victim_block_tables"))
            expect_method(manager, "restore_scheduled_requests", ("requests_in_batch",))
            expect_method(manager, "free_request_cpu_cache", ("state",))
        except UnsupportedEngineError:
            return False
        return hasattr(manager, "_request_id_to_cpu_blocks")

    def install(self, hooks: Hooks) -> None:
        hooks.wrap(self._manager, "_offload_to_cpu", event="export", before=self._leaving, after=self._left)
        hooks.wrap(self._manager, "restore_scheduled_requests", event="admit", before=self._coming, after=self._came)
        hooks.wrap(self._manager, "free_request_cpu_cache", event="release", before=self._dropped)

    def forget(self) -> None:
        """What left before now was told to a ledger that knows nothing any more."""
        self._manifests.clear()

    def _leaving(self, victims: list[Any], victim_block_tables: dict[str, dict[str, list[int]]]) -> dict[str, Any]:
        return {
            state.request_id: {
                name: self._recorders[name].ledger.export(blocks)
                for name, blocks in victim_block_tables[state.request_id].items()
                if blocks and self._recorders[name].window is None
            }
            for state in victims
        }

    def _left(self, manifests: dict[str, Any] | None, offloaded: set[str], *args: Any, **kwargs: Any) -> None:
        for request_id in offloaded:
            if manifests and manifests.get(request_id):
                self._manifests[request_id] = manifests[request_id]

    def _coming(self, requests_in_batch: list[Any]) -> _Coming:
        coming: _Coming = []
        for future in requests_in_batch:
            state = future.state
            if not state.is_cpu_offloaded:
                continue
            there = self._manager._request_id_to_cpu_blocks.get(state.request_id, {})
            for name, manifest in self._manifests.pop(state.request_id, {}).items():
                recorder = self._recorders[name]
                blocks = recorder.allocator.block_table.get(state.request_id, ())
                whole = min(len(there.get(name, ())), len(blocks), state.position_offset // recorder.page_tokens)
                if whole:
                    recorder.ledger.load(blocks[:whole], state.request_id)
                    coming.append((recorder, state, list(blocks[:whole]), manifest.part(range(whole))))
        return coming

    def _came(self, coming: _Coming | None, *args: Any, **kwargs: Any) -> None:
        for recorder, state, blocks, manifest in coming or ():
            recorder.restored(state, blocks, manifest)

    def _dropped(self, state: Any) -> None:
        self._manifests.pop(state.request_id, None)
