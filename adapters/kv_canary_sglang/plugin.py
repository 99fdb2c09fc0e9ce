"""The entry point in `sglang.srt.plugins`: called in every process of a server, before its engine is built.

Cheap, idempotent, starts no thread and never raises. With `KV_CANARY` unset nothing is imported and nothing is hooked.
One hook is registered with SGLang's own registry, behind `Scheduler.__init__`: when a scheduler is there, so are its
pools, and graphs are captured. All other hooks sit on the objects of that scheduler (`guard`).
"""

from __future__ import annotations

import logging
import os
from typing import Any

logger = logging.getLogger("kv_canary")

TARGET = "sglang.srt.managers.scheduler.Scheduler.__init__"

_registered = False


def register() -> None:
    """Asks for a guard behind `Scheduler.__init__` when the environment wants one."""
    global _registered
    if _registered or "KV_CANARY" not in os.environ:
        return
    _registered = True
    try:
        _register()
    except Exception as error:  # noqa: BLE001 - fails open: the server must come up
        logger.error("KV Canary is off in this process: %s", error)


def _register() -> None:
    from kv_canary.settings import Settings

    settings = Settings.from_environment()
    if not settings.enabled:
        return
    from kv_canary_sglang.versions import check_version, hook_registry

    version = check_version()

    def guard(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        try:
            from kv_canary_sglang.guard import SchedulerGuard

            scheduler.kv_canary = SchedulerGuard(scheduler, settings, version=version)
        except Exception as error:  # noqa: BLE001 - fails open
            logger.error("this scheduler is not guarded: %s", error)

    registry, after = hook_registry()
    registry.register(TARGET, guard, after)
