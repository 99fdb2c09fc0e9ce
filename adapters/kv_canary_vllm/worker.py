"""A worker's half: the sidecar beside the memory, fed with what the scheduler says of each step.

The hooks run on the thread that executes steps, and before the step is launched: whatever raises a generation is
recorded before anything may write the page. `WorkerGate` differs from the plain gate in where the engine's tables are:
with the scheduler, so they are asked for over the `Uplink` and come with a later step; and a quarantine goes straight
to the scheduler, from the canary thread, so that it is done before an idle engine schedules its next request.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from kv_canary.errors import CanaryMismatchError, KVCanaryError
from kv_canary.fences import fence_for
from kv_canary.fingerprint.kernels import compiled_kernels
from kv_canary.gate import EngineGate, EnginePort
from kv_canary.hooks import Hooks
from kv_canary.ledger import Fence, HostLedger
from kv_canary.registry import attach_canary_groups
from kv_canary.settings import Settings
from kv_canary.sidecar import Sidecar
from kv_canary_vllm import geometry
from kv_canary_vllm.geometry import WorkerCache
from kv_canary_vllm.mailbox import Uplink
from kv_canary_vllm.modes import engine_refusal
from kv_canary_vllm.wire import ATTRIBUTE, Event, Message, Replay

logger = logging.getLogger("kv_canary")

ASK_AGAIN_STEPS = 64
SLEEP = "the engine sleeps"
KV_CACHE = "kv_cache"  # vLLM's tag for the cache's memory


class WorkerGate(EngineGate):
    """A gate whose engine has its tables in another process.

    `tables` is what came with the current step; written by the engine's thread alone.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.uplink = Uplink()
        self.tables: list[Event] | None = None
        self._rank = rank
        self._asked_step = 0

    # Canary thread

    def open(self) -> None:
        super().open()
        self._ask("tables")

    def close(self) -> None:
        super().close()
        self._ask("off")

    def quarantine(self, space: str, page: int, incident: str) -> None:
        heard = self.uplink.send({"ask": "quarantine", "rank": self._rank, "pages": [(page, incident)]})
        self.reacted(
            incident,
            "quarantine: asked the scheduler to take the page out of the prefix cache"
            if heard
            else "quarantine failed: the scheduler runs on another machine",
        )

    def reactions_done(self) -> list[tuple[str, str]]:
        self.uplink.flush()
        return super().reactions_done()

    # Engine's thread

    def step(self, engine: EnginePort, tables: list[Event] | None) -> None:
        """Between two steps; `tables` if they came."""
        self.tables = tables
        if self.opening and tables is None and self.steps - self._asked_step >= ASK_AGAIN_STEPS:
            self._asked_step = self.steps
            self._ask("tables")
        self.boundary(engine)
        self.steps += 1

    def _open(self, engine: EnginePort) -> None:
        if self.tables is not None:
            super()._open(engine)

    def forget(self) -> None:
        super().forget()
        if self.opening:
            self._ask("tables")

    def _ask(self, what: str) -> None:
        self.uplink.send({"ask": what, "rank": self._rank})


class WorkerGuard:
    """Guards the cache of one worker from its first step on, once constructed; `release` restores everything."""

    def __init__(self, wrapper: Any, kv_cache_config: Any, settings: Settings, *, version: str) -> None:
        self._wrapper = wrapper
        worker = wrapper.worker
        parallel = wrapper.vllm_config.parallel_config
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        rank = (parallel.data_parallel_rank_local or 0) * ranks + int(worker.local_rank)
        self._rank = rank
        self.gate = WorkerGate(rank)
        self._hooks = Hooks(self.gate)
        self._device = torch.device(worker.device)
        geometry.register()
        compiled_kernels()
        self._refusal = engine_refusal(wrapper.vllm_config, kv_cache_config)
        cache = worker_cache(wrapper.vllm_config, kv_cache_config, self._refusal)
        groups = attach_canary_groups(pool=cache, settings=settings, device=self._device)
        self.ledger = HostLedger("blocks", kv_cache_config.num_blocks, groups=len(groups))
        self._replay = Replay(self.ledger)
        self._last_step = 0
        self.sidecar = Sidecar(settings, engine="vllm", engine_version=version, rank=rank)
        self.sidecar.start()
        self.sidecar.on_detach(self.release)
        try:
            self.sidecar.serve()
            self._install(worker)
            self.sidecar.attach(self.gate, [(self.ledger, groups)])
        except BaseException:
            self.sidecar.detach()
            raise

    def release(self) -> None:
        self._hooks.remove()
        self.gate.uplink.close()

    # What the gate asks of the engine

    def resync(self) -> None:
        self.ledger.reset()
        self._replay.apply(self.gate.tables or [], self._fence)

    def quarantine(self, space: str, page: int) -> str:
        return "quarantine: left to the scheduler"

    # Hooks

    def _install(self, worker: Any) -> None:
        self._hooks.replace(self._wrapper, "execute_model", self._around_execute(self._wrapper.execute_model))
        self._hooks.replace(self._wrapper, "shutdown", self._around_shutdown(self._wrapper.shutdown))
        if callable(original := getattr(worker, "sleep", None)):
            self._hooks.replace(worker, "sleep", self._around_sleep(original))
        if callable(original := getattr(worker, "discard", None)):
            self._hooks.replace(worker, "discard", self._around_discard(original))
        if callable(original := getattr(worker, "wake_up", None)):
            self._hooks.replace(worker, "wake_up", self._around_wake(original))

    def _around_execute(self, original: Any) -> Any:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                self._before_step(getattr(scheduler_output, ATTRIBUTE, None))
            except CanaryMismatchError:
                raise
            except Exception as error:  # noqa: BLE001 - the engine must never see it
                self.gate.fail("step", error)
            return original(scheduler_output, *args, **kwargs)

        return execute_model

    def _before_step(self, message: Message | None) -> None:
        gate = self.gate
        if message is None:
            if gate.recording:
                gate.fail("step", KVCanaryError("a step came without the scheduler's events"))
            gate.step(self, None)
            return
        gate.uplink.connect(message["mailbox"])
        for rank, incident, text in message.get("reactions", ()):
            if rank == self._rank:
                gate.reacted(incident, text)
        failed = message.get("failed")
        if self._refusal is not None:
            return
        if failed is not None and (gate.recording or gate.opening) and gate.failure is None:
            gate.fail(f"{failed[0]} (scheduler)", KVCanaryError(failed[1]))
        self._replay.learn(message.get("names", {}))
        missed = message["step"] != self._last_step + 1
        self._last_step = message["step"]
        if gate.recording and (missed or "events" not in message):
            gate.forget()  # events were lost, or nobody records them
        recorded = gate.recording
        gate.step(self, message.get("tables"))
        if gate.recording and "events" in message:
            known = 0 if recorded else message["tables_at"]
            self.ledger.step(message["step"])
            self._replay.apply(message["events"][known:], self._fence)

    def _fence(self) -> Fence | None:
        return fence_for(self._device)

    def _around_shutdown(self, original: Any) -> Any:
        def shutdown() -> Any:
            self.sidecar.detach()
            return original()

        return shutdown

    def _around_sleep(self, original: Any) -> Any:
        """Sleep gives the cache's memory back, at any level: nothing is read from before that on."""

        def sleep(*args: Any, **kwargs: Any) -> Any:
            self._lose()
            return original(*args, **kwargs)

        return sleep

    def _around_discard(self, original: Any) -> Any:
        def discard(tags: Any, *args: Any, **kwargs: Any) -> Any:
            if KV_CACHE in tags:
                self._lose()
            return original(tags, *args, **kwargs)

        return discard

    def _around_wake(self, original: Any) -> Any:
        def wake_up(tags: Any = None, *args: Any, **kwargs: Any) -> Any:
            result = original(tags, *args, **kwargs)
            if tags is None or KV_CACHE in tags:
                self.sidecar.resume(SLEEP)
            return result

        return wake_up

    def _lose(self) -> None:
        self.sidecar.suspend(SLEEP)
        self.gate.forget()


def worker_cache(vllm_config: Any, kv_cache_config: Any, refusal: str | None) -> WorkerCache:
    """The pool of a worker, from its configuration and the tensors bound to its layers."""
    from vllm.v1.kv_cache_interface import compute_layout_strides
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layout = KVCacheLayout[kv_cache_config.kv_cache_layout]

    def strides(spec: Any, blocks: int, layers: int, layer_stride: int, block_stride: int) -> tuple[int, ...]:
        fixed = (layer_stride, block_stride, None, None, None)
        return tuple(compute_layout_strides(spec, blocks, layers, layout, fixed_strides=fixed))

    tensors: dict[str, torch.Tensor] = {}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        bound = getattr(layer, "kv_cache", None)
        while isinstance(bound, (list, tuple)) and bound:  # state layers bind several views of one page
            bound = bound[0]
        if isinstance(bound, torch.Tensor) and bound.numel():
            tensors[name] = bound
    text_config = getattr(vllm_config.model_config, "hf_text_config", None)
    return WorkerCache(
        config=kv_cache_config,
        tensors=tensors,
        strides=strides,
        layers=getattr(text_config, "num_hidden_layers", None),
        refusal=refusal,
    )
