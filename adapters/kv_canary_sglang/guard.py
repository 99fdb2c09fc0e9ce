"""The guard of one scheduler: a sidecar beside its pools, fed with what its thread does.

One scheduler process a rank, with its own pool, allocator and prefix cache, so each rank guards itself. All hooks sit
on the objects of the scheduler and run on its thread. Construct it when the scheduler is complete; `release` restores
everything.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import torch

from kv_canary.errors import CanaryMismatchError, GeometryError, UnsupportedEngineError, UnsupportedPoolError
from kv_canary.fingerprint.kernels import compiled_kernels
from kv_canary.geometry import CanaryGroup, unguarded_group
from kv_canary.hooks import Hooks
from kv_canary.ledger import HostLedger
from kv_canary.ledger.base import OwnerNames
from kv_canary.registry import attach_canary_groups
from kv_canary.settings import Settings
from kv_canary.sidecar import Sidecar
from kv_canary.slot_chain import SlotChain
from kv_canary.snapshot import UncoveredBuffer
from kv_canary_sglang import pools
from kv_canary_sglang.allocators import AllocatorSpace
from kv_canary_sglang.audit import TreeAudit
from kv_canary_sglang.gate import SchedulerGate
from kv_canary_sglang.modes import DRAFT_REASON, STATE_REASON, engine_refusal, inner_allocators
from kv_canary_sglang.order import EventOrder
from kv_canary_sglang.prefix_cache import PrefixCacheHooks, Quarantined
from kv_canary_sglang.requests import Rows
from kv_canary_sglang.resync import Resync
from kv_canary_sglang.steps import StepRecorder
from kv_canary_sglang.versions import check_targets
from kv_canary_sglang.window import WindowMap

logger = logging.getLogger("kv_canary")

RELEASED = "the engine gave its KV memory back"
KV_CACHE = "kv_cache"  # SGLang's tag for the cache's memory


class SchedulerGuard:
    """Guards the pools of `scheduler` from its next step on."""

    def __init__(self, scheduler: Any, settings: Settings, *, version: str) -> None:
        self._scheduler = scheduler
        self._runner = scheduler.tp_worker.model_runner
        self._pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        self._device = torch.device(self._runner.device)
        self._settings = settings
        self.refusal = engine_refusal(scheduler)
        if self.refusal is None:
            check_targets(scheduler)
        compiled_kernels()
        self.sidecar = Sidecar(settings, engine="sglang", engine_version=version, rank=_local_rank())
        quarantined = Quarantined()
        self.gate = SchedulerGate(quarantined, ranks=_ranks_in_step())
        self._hooks = Hooks(self.gate)
        self.sidecar.start()
        self.sidecar.on_detach(self._hooks.remove)
        try:
            self.sidecar.serve()
            self._attach(quarantined)
        except BaseException:
            self.sidecar.detach()
            raise

    def release(self) -> None:
        self.sidecar.detach()

    # Attaching

    def _attach(self, quarantined: Quarantined) -> None:
        groups, uncovered = self._groups()
        if self.refusal is not None or not groups:  # listed, and nothing is hooked
            pages = max((group.pages for group in groups), default=1)
            self.sidecar.attach(self.gate, [(HostLedger("slots", pages), groups)], uncovered=uncovered)
            return
        full = [group for group in groups if group.kind != "swa"]
        windowed = [group for group in groups if group.kind == "swa"]
        scheduler = self._scheduler
        order = EventOrder(self._device, getattr(scheduler, "forward_stream", None))
        names = OwnerNames()
        full_allocator, window_allocator = inner_allocators(scheduler.token_to_kv_pool_allocator)
        spaces = [(AllocatorSpace("slots", full_allocator, order, names), full)]
        window = None
        if window_allocator is not None:
            space = AllocatorSpace("window", window_allocator, order, names)
            window = WindowMap(scheduler.token_to_kv_pool_allocator, space, order)
            spaces.append((space, windowed))
        for space, members in spaces:
            for group in members:
                if group.stripes and group.pages != space.pages:
                    raise UnsupportedEngineError(
                        f"group {group.name} has {group.pages} pages, its allocator {space.pages}: they do not fit"
                    )
        self._record(spaces[0][0], window, order, names, quarantined)
        for space, _ in spaces:
            space.hook(self._hooks)
            self.gate.ledgers[space.name] = space.ledger
        self.sidecar.attach(
            self.gate, [(space.ledger, members) for space, members in spaces if members], uncovered=uncovered
        )

    def _record(
        self,
        full: AllocatorSpace,
        window: WindowMap | None,
        order: EventOrder,
        names: OwnerNames,
        quarantined: Quarantined,
    ) -> None:
        scheduler, hooks = self._scheduler, self._hooks
        tree, table = scheduler.tree_cache, scheduler.req_to_token_pool
        chain = SlotChain(
            full.pages * full.page_size, self._device, longest=int(scheduler.server_args.chunked_prefill_size or 0) + 1
        )
        rows = Rows(table, tree, full, window, order, names)
        self.audit = TreeAudit(tree, full, window, order, monotonic=time.monotonic)
        self._resync = Resync(scheduler, full, window, rows, chain, self.audit, order)
        rows.hook(hooks)
        StepRecorder(full, window, rows, chain, order).hook(hooks, self._runner)
        PrefixCacheHooks(tree, full.page_size, self.gate, quarantined).hook(hooks)
        hooks.replace(scheduler, "get_next_batch_to_run", self._around_next_batch(scheduler.get_next_batch_to_run))
        self._hook_memory(getattr(scheduler, "weight_updater", None))

    def _groups(self) -> tuple[list[CanaryGroup], list[UncoveredBuffer]]:
        """Groups of the model's pool, and, named only, those of a draft model's."""
        pools.register()
        try:
            found = attach_canary_groups(pool=self._pool, settings=self._settings, device=self._device)
        except (UnsupportedPoolError, GeometryError) as error:
            logger.error("this scheduler is not guarded: %s", error)
            return [], [UncoveredBuffer(name=type(self._pool).__qualname__, reason=str(error))]
        groups = [self._guardable(group) for group in found]
        for pool in self._draft_pools():
            try:
                drafts = attach_canary_groups(
                    pool=pool, settings=self._settings, device=self._device, kv_token_id_vs_position_offset=1
                )
            except (UnsupportedPoolError, GeometryError) as error:
                return groups, [UncoveredBuffer(name=type(pool).__qualname__, reason=str(error))]
            groups += [
                replace(_unguarded(group, DRAFT_REASON), name=f"draft_{group.name}", kv_token_id_vs_position_offset=1)
                for group in drafts
            ]
        return groups, []

    def _guardable(self, group: CanaryGroup) -> CanaryGroup:
        if self.refusal is not None:
            return _unguarded(group, self.refusal)
        return _unguarded(group, STATE_REASON) if group.kind == "state" else group

    def _draft_pools(self) -> list[Any]:
        worker = getattr(self._scheduler, "draft_worker", None)
        runner = getattr(worker, "draft_runner", None) or getattr(worker, "model_runner", None)
        pool = getattr(runner, "token_to_kv_pool", None)
        return [pool] if pool is not None and pool is not self._pool else []

    # What the gate asks of the engine

    def resync(self) -> None:
        self._resync.run()

    def quarantine(self, space: str, page: int) -> str:
        return "quarantine: left to the canary thread"

    # Hooks

    def _around_next_batch(self, original: Any) -> Any:
        def get_next_batch_to_run(*args: Any, **kwargs: Any) -> Any:
            self._between_steps()
            return original(*args, **kwargs)

        return get_next_batch_to_run

    def _between_steps(self) -> None:
        gate = self.gate
        try:
            gate.steps = self._scheduler.forward_ct
            gate.boundary(self)
            if gate.recording:
                self.audit.run_if_due()
        except CanaryMismatchError:
            raise
        except Exception as error:  # noqa: BLE001 - the engine must never see it
            gate.fail("step", error)

    def _hook_memory(self, updater: Any) -> None:
        """Memory that is given back is not read, and what it holds when it comes again is nobody's."""
        adapter = getattr(updater, "memory_saver_adapter", None)
        if adapter is None:
            return
        pause, resume = adapter.pause, adapter.resume

        def paused(tag: str, *args: Any, **kwargs: Any) -> Any:
            if tag == KV_CACHE:
                self.sidecar.suspend(RELEASED)
                self.gate.forget()
            return pause(tag, *args, **kwargs)

        def resumed(tag: str, *args: Any, **kwargs: Any) -> Any:
            result = resume(tag, *args, **kwargs)
            if tag == KV_CACHE:
                self.sidecar.resume(RELEASED)
            return result

        self._hooks.replace(adapter, "pause", paused)
        self._hooks.replace(adapter, "resume", resumed)


def _unguarded(group: CanaryGroup, reason: str) -> CanaryGroup:
    return unguarded_group(
        group.name,
        group.kind,
        pages=group.pages,
        buffers=[*(buffer.name for buffer in group.buffers), *(buffer.name for buffer in group.uncovered)],
        reason=reason,
    )


def _local_rank() -> int:
    """Place of this scheduler among those of this machine."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    tp, pp, nodes = int(parallel.tp_size), int(parallel.pp_size), int(parallel.nnodes)
    place = (int(parallel.dp_rank or 0) * pp + int(parallel.pp_rank)) * tp + int(parallel.tp_rank)
    return place % max(1, tp * pp // nodes) if nodes > 1 else place


def _ranks_in_step() -> int:
    """Schedulers that must take the same decisions."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.tp_size) * int(parallel.pp_size)
