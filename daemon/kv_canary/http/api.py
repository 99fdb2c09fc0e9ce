"""The control API as an application: builds it, guards it, documents it.

Every read answers from the newest snapshot; every write becomes a command for the canary thread. Nothing here touches a
tensor, and no route blocks: they all run on the event loop of the HTTP thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp

from kv_canary._version import __version__
from kv_canary.clock import Clock, SystemClock
from kv_canary.commands import Command, Control
from kv_canary.http.pages import add_page_routes
from kv_canary.http.probes import add_probe_routes
from kv_canary.http.problems import ProblemError, as_problem_media_type, install_problem_handlers
from kv_canary.http.reads import add_read_routes
from kv_canary.http.security import SecurityMiddleware, SecurityPolicy
from kv_canary.http.stream import StreamTiming, add_stream_route
from kv_canary.http.writes import add_write_routes
from kv_canary.settings import Settings
from kv_canary.snapshot import Snapshot

COMMAND_TIMEOUT_SECONDS = 5.0


class _Door:
    """The way from the routes to the sidecar, which can be shut.

    FastAPI keeps functions that were routes, and with them all they refer to, in caches that live as long as the
    process. So routes refer to nothing large: to this, and it lets go of the sidecar when its server has stopped.
    """

    def __init__(self, control: Control) -> None:
        self._control: Control | None = control

    def snapshot(self) -> Snapshot:
        return self._open().snapshot()

    def submit(self, command: Command) -> Future[Any]:
        return self._open().submit(command)

    def shut(self) -> None:
        self._control = None

    def _open(self) -> Control:
        if self._control is None:
            raise ProblemError(503, "this server has stopped")
        return self._control


class CanaryApi(FastAPI):
    """FastAPI with the guard outside everything else, and with problems documented under their own media type.

    `app.state.stopping` is an `asyncio.Event`: once set, open streams and waiting writes end by themselves. `shut` is
    to be called when nobody serves it any more.
    """

    def __init__(self, policy: SecurityPolicy, shut: Callable[[], None]) -> None:
        self._policy = policy
        self.shut = shut
        # Newer FastAPI reports to the process's OpenTelemetry providers, which are the host's; older ones ignore this.
        quiet: Any = dict.fromkeys(("tracing", "metrics", "logs", "operation_spans", "auto_configure"), False)
        super().__init__(
            title="KV Canary",
            summary="Guards the KV cache of this LLM server.",
            version=__version__,
            docs_url=None,  # the documentation pages load their scripts from elsewhere
            redoc_url=None,
            redirect_slashes=False,
            telemetry=quiet,
        )
        self.state.stopping = asyncio.Event()

    def build_middleware_stack(self) -> ASGIApp:
        # Not `add_middleware`: FastAPI puts layers of its own around those.
        return SecurityMiddleware(super().build_middleware_stack(), self._policy)

    def openapi(self) -> dict[str, Any]:
        return as_problem_media_type(super().openapi())


def build_app(
    control: Control,
    *,
    settings: Settings,
    clock: Clock | None = None,
    targets: Callable[[], list[str]] | None = None,
    command_timeout_seconds: float = COMMAND_TIMEOUT_SECONDS,
    stream_timing: StreamTiming | None = None,
) -> CanaryApi:
    """The whole API over `control`.

    `settings` gives what cannot change while running: the bound host, the token file and the allowed hosts.
    `targets` lists the `host:port` of the sidecars of all local ranks; it is called off the event loop, so it may read
    files. Without it, `/v1/targets` lists this sidecar.
    """
    door = _Door(control)
    app = CanaryApi(SecurityPolicy.of(settings.host, settings.token_file, settings.allowed_hosts), door.shut)
    install_problem_handlers(app)
    add_probe_routes(app, door, clock or SystemClock(), targets)
    add_stream_route(app, door, stream_timing or StreamTiming())
    add_read_routes(app, door)
    add_page_routes(app, door, command_timeout_seconds)
    add_write_routes(app, door, command_timeout_seconds)
    return app
