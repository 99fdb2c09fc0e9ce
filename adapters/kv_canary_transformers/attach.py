"""`attach`: guards a continuous-batching manager, or every manager that a model makes."""

from __future__ import annotations

import logging
from typing import Any

from kv_canary.errors import UnsupportedEngineError
from kv_canary.fingerprint.kernels import compiled_kernels
from kv_canary.hooks import expect_method
from kv_canary.identity_kernel import compiled_extend_each
from kv_canary.settings import Settings
from kv_canary.sidecar import Sidecar
from kv_canary_transformers import geometry
from kv_canary_transformers.processor import ProcessorGuard
from kv_canary_transformers.versions import SUPPORTED, check_version

logger = logging.getLogger("kv_canary")


def attach(target: Any, settings: Settings | None = None, *, serve: bool = True, seed: int | None = None) -> Sidecar:
    """Guards the KV cache of `target` from now on.

    `target` is a `ContinuousBatchingManager`, started or not, or a model: then every manager that the model makes from
    now on. `settings` default to the environment's (`KV_CANARY_*`). With `serve`, the HTTP API is up when this returns,
    unless no port could be had: that is logged, and the guard works without it. `sidecar.detach()` restores everything.

    Raises `UnsupportedEngineError` when this transformers is not supported (nothing is touched then), and
    `SettingsError`.
    """
    version = check_version()
    geometry.register()
    watch: _ManagerWatch | _ModelWatch
    if hasattr(target, "_create_batch_processor"):
        expect_method(target, "_create_batch_processor", ())
        expect_method(target, "stop", ("block", "timeout"))
        watch = _ManagerWatch(target)
    elif hasattr(target, "init_continuous_batching"):
        watch = _ModelWatch(target)
    else:
        raise UnsupportedEngineError(
            f"cannot attach to a {type(target).__qualname__}; give a ContinuousBatchingManager, or a model that has "
            f"init_continuous_batching (transformers {SUPPORTED})"
        )
    compiled_extend_each()
    compiled_kernels()  # takes seconds the first time: here, not in the middle of serving
    sidecar = Sidecar(settings, engine="transformers", engine_version=version, seed=seed)
    sidecar.start()
    sidecar.on_detach(watch.remove)
    try:
        if serve:
            sidecar.serve()
        watch.install(sidecar)
    except BaseException:
        sidecar.detach()
        raise
    return sidecar


class _ManagerWatch:
    """Guards a manager's batch processor, whenever it has one."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._sidecar: Sidecar | None = None
        self._guard: ProcessorGuard | None = None

    def install(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar
        manager = self._manager
        create, stop = manager._create_batch_processor, manager.stop

        def create_and_guard() -> Any:
            processor = create()
            self._meet(processor)
            return processor

        def stop_and_release(*args: Any, **kwargs: Any) -> Any:
            result = stop(*args, **kwargs)
            if manager.batch_processor is None:
                self._release()  # or its cache would stay in memory for our sake
            return result

        manager._create_batch_processor = create_and_guard
        manager.stop = stop_and_release
        if manager.batch_processor is not None:
            self._guard = ProcessorGuard(sidecar, manager.batch_processor)

    def remove(self) -> None:
        for name in ("_create_batch_processor", "stop"):
            vars(self._manager).pop(name, None)
        self._release()

    def _meet(self, processor: Any) -> None:
        """On the generation thread, before its first step. The engine starts whatever happens here."""
        try:
            if self._guard is not None and self._guard.processor is processor:
                self._guard.restarted()
                return
            self._release()
            if self._sidecar is not None:
                self._guard = ProcessorGuard(self._sidecar, processor)
        except Exception as error:  # noqa: BLE001 - fails open
            logger.error("this engine is not guarded: %s", error)
            if self._sidecar is not None:
                self._sidecar.note_error("hook", error)

    def _release(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.release()


class _ModelWatch:
    """Guards every manager that a model makes."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._managers: list[_ManagerWatch] = []

    def install(self, sidecar: Sidecar) -> None:
        model = self._model
        make = model.init_continuous_batching

        def make_and_watch(*args: Any, **kwargs: Any) -> Any:
            manager = make(*args, **kwargs)
            if not any(watch._manager is manager for watch in self._managers):
                watch = _ManagerWatch(manager)
                watch.install(sidecar)
                self._managers.append(watch)
            return manager

        model.init_continuous_batching = make_and_watch
        cached = getattr(model, "_cached_continuous_batching_manager", None)
        if cached is not None:
            watch = _ManagerWatch(cached)
            watch.install(sidecar)
            self._managers.append(watch)

    def remove(self) -> None:
        vars(self._model).pop("init_continuous_batching", None)
        while self._managers:
            self._managers.pop().remove()
