"""The entry point in `vllm.general_plugins`: called in the API server, the engine core and every worker.

Cheap, idempotent, starts no thread and never raises: vLLM guards the loading of a plugin, not the call. With
`KV_CANARY` unset nothing is imported and nothing is hooked.
"""

from __future__ import annotations

import logging
import os
from typing import Any

logger = logging.getLogger("kv_canary")

_registered = False


def register() -> None:
    """Hooks `Scheduler.__init__` and `WorkerWrapperBase.initialize_from_config` when the environment asks for it."""
    global _registered
    if _registered or "KV_CANARY" not in os.environ:
        return
    _registered = True
    try:
        _register()
    except Exception as error:  # noqa: BLE001 - fails open: the server must come up
        _speak()
        logger.error("KV Canary is off in this process: %s", error)


def _register() -> None:
    from kv_canary.settings import Settings

    settings = Settings.from_environment()
    if not settings.enabled:
        return
    _speak()
    from kv_canary_vllm.versions import check_version, hook_classes

    version = check_version()
    scheduler_class, wrapper_class = hook_classes()
    _watch_schedulers(scheduler_class)
    _watch_workers(wrapper_class, settings, version)


def _speak() -> None:
    """Our log lines look like the server's: our own logger borrows its handlers, if nobody has given it any."""
    if not logger.hasHandlers():
        for handler in logging.getLogger("vllm").handlers:
            logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


def _watch_schedulers(scheduler_class: Any) -> None:
    original = scheduler_class.__init__

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            from kv_canary_vllm.scheduler import SchedulerGuard

            self._kv_canary = SchedulerGuard(self)
        except Exception as error:  # noqa: BLE001 - fails open
            logger.error("the scheduler's events are not recorded, so nothing is guarded: %s", error)

    initialise.__wrapped__ = original  # type: ignore[attr-defined]
    scheduler_class.__init__ = initialise


def _watch_workers(wrapper_class: Any, settings: Any, version: str) -> None:
    original = wrapper_class.initialize_from_config

    def initialize_from_config(self: Any, kv_cache_configs: list[Any]) -> Any:
        result = original(self, kv_cache_configs)
        try:
            _attach_when_warm(self, kv_cache_configs[self.global_rank], settings, version)
        except Exception as error:  # noqa: BLE001 - fails open
            logger.error("this worker is not guarded: %s", error)
        return result

    initialize_from_config.__wrapped__ = original  # type: ignore[attr-defined]
    wrapper_class.initialize_from_config = initialize_from_config


def _attach_when_warm(wrapper: Any, kv_cache_config: Any, settings: Any, version: str) -> None:
    """Warming up writes real blocks, and graph capture must not meet launches of ours: the guard starts after both."""
    worker = wrapper.worker
    warm_up = worker.compile_or_warm_up_model

    def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> Any:
        result = warm_up(*args, **kwargs)
        try:
            from kv_canary_vllm.worker import WorkerGuard

            previous = vars(wrapper).pop("_kv_canary", None)
            if previous is not None:
                previous.sidecar.detach()
            vars(wrapper)["_kv_canary"] = WorkerGuard(wrapper, kv_cache_config, settings, version=version)
        except Exception as error:  # noqa: BLE001 - fails open
            logger.error("this worker is not guarded: %s", error)
        return result

    worker.compile_or_warm_up_model = compile_or_warm_up_model
