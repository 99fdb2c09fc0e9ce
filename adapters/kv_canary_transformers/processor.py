"""Guards one `ContinuousBatchProcessor`: hooks on its cache, allocators and inputs, and the engine's side of the gate.

The hooks run on the engine's generation thread, which is the only one that touches the cache, so nothing here needs a
lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import torch

from kv_canary.errors import CanaryMismatchError
from kv_canary.fences import StreamFence
from kv_canary.gate import EngineGate
from kv_canary.hooks import Hooks, expect_method
from kv_canary.ledger import Fence, HostLedger
from kv_canary.registry import attach_canary_groups
from kv_canary.sidecar import Sidecar
from kv_canary.snapshot import UncoveredBuffer
from kv_canary_transformers.offload import OPEN_BLOCK_REASON, UNKNOWN_REASON, OffloadRecorder
from kv_canary_transformers.recorder import Progress, Recorder

_BATCHES_IN_FLIGHT = 4  # two with asynchronous batching; warm-up batches are never updated and fall off the end

_InFlight = tuple[Any, int, list[Progress]]


class ProcessorGuard:
    """Attaches on construction; `release` restores everything."""

    def __init__(self, sidecar: Sidecar, processor: Any) -> None:
        self.processor = processor
        self._sidecar = sidecar
        self._cache = processor.cache
        self._pool = processor.cache.pool
        self._io = processor.inputs_and_outputs
        self.gate = EngineGate()
        self._hooks = Hooks(self.gate)
        self._prompt: list[int] | None = None
        self._batches: deque[dict[int, _InFlight]] = deque(maxlen=_BATCHES_IN_FLIGHT)
        self._sector_owner: dict[int, int] = {}
        self._check_targets()
        pools = []
        self.recorders: list[Recorder] = []
        manager = processor.offloading_manager
        travels = OffloadRecorder.has_pool(manager) and OffloadRecorder.is_modelled(manager)
        for allocator in self._cache.cache_allocators.values():
            groups = attach_canary_groups(
                pool=allocator, settings=sidecar.settings, device=torch.device(self._cache.device)
            )
            groups = tuple(replace(group, travels=travels) for group in groups)
            ledger = HostLedger(groups[0].name, groups[0].pages)
            self.recorders.append(Recorder(allocator, ledger, self._fence))
            pools.append((ledger, groups))
        self._by_index = {recorder.index: recorder for recorder in self.recorders}
        self._offload = OffloadRecorder(manager, self.recorders) if travels else None
        self._install()
        try:
            sidecar.attach(self.gate, pools, uncovered=self._uncovered())
        except BaseException:
            self._hooks.remove()
            raise

    def release(self) -> None:
        """Nothing of this processor is read or hooked any more when it returns."""
        self._sidecar.release(self.gate)
        self._hooks.remove()

    def restarted(self) -> None:
        """The engine reset the processor: read its tables anew at the next step."""
        self.gate.close()
        if self._sidecar.snapshot().enabled:
            self.gate.open()

    # What the canary asks of the engine (on the engine's thread)

    def resync(self) -> None:
        scheduler = self.processor.scheduler
        states = {**scheduler.waiting_requests, **scheduler.active_requests}
        self._batches.clear()
        self._sector_owner = {}
        if self._offload is not None:
            self._offload.forget()
        for recorder in self.recorders:
            trees = self._pool._free_blocks[recorder.index].trees
            blocks = [block for leaves in trees.values() for block in leaves]
            known = [*blocks, *recorder.allocator.ledger.cached_blocks]
            known += [block for table in recorder.allocator.block_table.values() for block in table]
            per_sector = recorder.allocator.blocks_per_sector
            self._sector_owner.update({block // per_sector: recorder.index for block in known})
            if recorder is self.recorders[0]:  # free sectors belong to nobody: the first ledger watches over them
                for sector in self._pool.free_sectors:
                    self._sector_owner[sector] = recorder.index
                    blocks += self._blocks_of(recorder, sector)
            recorder.resync(states, blocks)

    def quarantine(self, space: str, page: int) -> str:
        recorder = next(recorder for recorder in self.recorders if recorder.ledger.name == space)
        ledger = recorder.allocator.ledger
        block_hash = ledger.block_to_hash.pop(page, None)
        if block_hash is None:
            return "quarantine: the page was not in the prefix cache"
        if ledger.hash_to_block.get(block_hash) == page:
            del ledger.hash_to_block[block_hash]
        if page in ledger.cached_blocks:
            del ledger.cached_blocks[page]
            self._pool.free_blocks(recorder.index, [page])
            return "quarantine: taken out of the prefix cache and freed"
        return "quarantine: taken out of the prefix cache; the requests that hold it go on"

    # Hooks

    def _check_targets(self) -> None:
        expect_method(self.processor, "prepare_next_batch", ())
        expect_method(self._io, "prepare_batch_tensors", ("requests_in_batch",))
        expect_method(self._io, "prepare_batch_update", ())
        expect_method(self._cache, "search_prefix_match", ("request_id", "prompt_ids"))
        expect_method(self._cache, "reset", ())
        expect_method(self._pool, "get_free_blocks", ("index", "num_blocks"))
        expect_method(self._pool, "free_blocks", ("index", "block_ids"))
        expect_method(self._pool, "allocate_sector", ("index",))
        for allocator in self._cache.cache_allocators.values():
            expect_method(allocator, "allocate_cache_to_request", ("request_id", "past_length", "query_length"))
            expect_method(allocator, "free_blocks", ("request_id", "no_cache"))
            expect_method(allocator, "acquire_prefix_blocks", ("request_id", "prefix_len", "block_ids"))
            expect_method(allocator, "mark_complete_blocks", ("request_id", "token_ids"))
            expect_method(allocator, "fork_blocks", ("source_request_id", "dest_request_id", "past_length"))
            expect_method(allocator, "copy_blocks", ("source_block_ids", "dest_block_ids"))

    def _install(self) -> None:
        wrap, pool = self._hooks.wrap, self._pool
        self._hooks.replace(
            self.processor, "prepare_next_batch", self._between_steps(self.processor.prepare_next_batch)
        )
        wrap(self._io, "prepare_batch_tensors", event="write", before=self._step_prepared)
        wrap(self._io, "prepare_batch_update", event="seal", after=self._step_done)
        wrap(self._cache, "search_prefix_match", event="claim", before=self._prompt_searched)
        wrap(self._cache, "reset", event="step", before=lambda: self.restarted())
        wrap(pool, "get_free_blocks", event="allocate", after=self._blocks_given)
        wrap(
            pool,
            "free_blocks",
            event="free",
            before=lambda index, block_ids: self._by_index[index].blocks_freed(block_ids),
        )
        wrap(pool, "allocate_sector", event="forget", before=self._sector_given)
        for recorder in self.recorders:
            self._install_on_allocator(recorder)
        if self._offload is not None:
            self._offload.install(self._hooks)

    def _install_on_allocator(self, recorder: Recorder) -> None:
        wrap, allocator = self._hooks.wrap, recorder.allocator

        def set_owner(request_id: str, *args: Any, **kwargs: Any) -> None:
            recorder.owner = request_id

        def forking(source_request_id: str, dest_request_id: str, past_length: int) -> None:
            recorder.owner = dest_request_id

        def forked(token: None, result: Any, source_request_id: str, dest_request_id: str, past_length: int) -> None:
            recorder.forked(source_request_id, dest_request_id, result[1])

        def prefix_taken(token: None, result: Any, request_id: str, *args: Any, **kwargs: Any) -> None:
            recorder.prefix_taken(request_id, self._prompt)

        def ends(request_id: str, *args: Any, **kwargs: Any) -> None:
            recorder.request_ends(request_id)

        def marking(request_id: str, *args: Any, **kwargs: Any) -> list[int]:
            return recorder.deduplication_begins(request_id)

        def marked(before: list[int] | None, result: Any, request_id: str, *args: Any, **kwargs: Any) -> None:
            recorder.deduplication_ends(request_id, before or [])

        def copying(source_block_ids: Any, dest_block_ids: Any) -> None:
            recorder.copying(dest_block_ids)

        def copied(token: None, result: Any, source_block_ids: Any, dest_block_ids: Any) -> None:
            recorder.copied(source_block_ids, dest_block_ids)

        wrap(allocator, "allocate_cache_to_request", event="allocate", before=set_owner)
        wrap(allocator, "free_blocks", event="release", before=ends)
        wrap(allocator, "acquire_prefix_blocks", event="claim", after=prefix_taken)
        wrap(allocator, "mark_complete_blocks", event="claim", before=marking, after=marked)
        wrap(allocator, "fork_blocks", event="claim", before=forking, after=forked)
        wrap(allocator, "copy_blocks", event="move", before=copying, after=copied)

    def _between_steps(self, original: Any) -> Any:
        gate, recorders = self.gate, self.recorders

        def prepare_next_batch() -> Any:
            try:
                gate.boundary(self)
                if gate.recording:
                    for recorder in recorders:
                        recorder.settle()
                        recorder.ledger.step(gate.steps + 1)
            except CanaryMismatchError:
                raise
            except Exception as error:  # noqa: BLE001 - the engine must never see it
                gate.fail("step", error)
            prepared = original()
            gate.steps += bool(prepared)
            return prepared

        return prepare_next_batch

    def _prompt_searched(self, request_id: str, prompt_ids: list[int]) -> None:
        self._prompt = prompt_ids

    def _blocks_given(self, token: None, result: list[int], index: int, num_blocks: int) -> None:
        self._by_index[index].blocks_given(result)

    def _sector_given(self, index: int) -> None:
        """A sector goes to an allocator: to all others its blocks are memory lent away, not to be looked at."""
        if len(self.recorders) == 1:
            return
        sector = self._pool.free_sectors[-1]
        before = self._sector_owner.get(sector)
        if before == index:
            return
        self._sector_owner[sector] = index
        if before is not None:
            self._by_index[before].ledger.forget(self._blocks_of(self._by_index[before], sector))
        recorder = self._by_index[index]
        recorder.ledger.free(self._blocks_of(recorder, sector), fence=self._fence())

    def _blocks_of(self, recorder: Recorder, sector: int) -> list[int]:
        per_sector = recorder.allocator.blocks_per_sector
        return list(range(sector * per_sector, (sector + 1) * per_sector))

    def _step_prepared(self, requests_in_batch: list[Any], *args: Any, **kwargs: Any) -> None:
        batch: dict[int, _InFlight] = {}
        written: list[tuple[Recorder, list[int], list[str]]] = [(recorder, [], []) for recorder in self.recorders]
        for future in requests_in_batch:
            state, length = future.state, future.query_length
            request_id, past = state.request_id, state.position_offset
            entries = []
            for recorder, pages, owners in written:
                entries.append(recorder.progress_of(request_id))
                for page in recorder.pages_of_step(request_id, past, length):
                    pages.append(page)
                    owners.append(request_id)
            batch[id(future)] = (future, past + length, entries)
        self._batches.append(batch)
        for recorder, pages, owners in written:
            if pages:
                recorder.ledger.write(pages, owners)

    def _step_done(self, token: None, result: Any) -> None:
        """The step's results are on the host, so its KV is in place: seal the blocks that it completed."""
        due: list[tuple[Recorder, list[tuple[Any, Progress, int]]]] = [(recorder, []) for recorder in self.recorders]
        for future in result[0]:
            key = id(future)
            for batch in self._batches:
                if key in batch:
                    _, end, entries = batch.pop(key)
                    for (recorder, completing), progress in zip(due, entries, strict=True):
                        if recorder.completes(progress, end):
                            completing.append((future.state, progress, end))
                    break
        for recorder, completing in due:
            if completing:
                pages, identities = recorder.completed(completing)
                if pages:
                    recorder.ledger.seal(pages, identities)

    def _fence(self) -> Fence | None:
        stream = self._io.compute_stream
        return StreamFence(stream) if stream is not None else None

    def _uncovered(self) -> tuple[UncoveredBuffer, ...]:
        if not OffloadRecorder.has_pool(self.processor.offloading_manager):
            return ()
        reason = UNKNOWN_REASON if self._offload is None else OPEN_BLOCK_REASON
        return (UncoveredBuffer(name="cpu swap pool", reason=reason),)
