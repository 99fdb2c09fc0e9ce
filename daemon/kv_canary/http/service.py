"""Service: the HTTP API of one sidecar, from its settings to a port that answers. The sidecar starts and stops it."""

from __future__ import annotations

import logging

from kv_canary.commands import Control
from kv_canary.http.api import build_app
from kv_canary.http.security import check_token_file
from kv_canary.http.server import HttpServer, bind_socket
from kv_canary.http.targets import LocalTargets
from kv_canary.settings import Settings

logger = logging.getLogger("kv_canary")

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - compared with, not bound


class Service:
    """Running once constructed.

    Raises `SettingsError` for a token file that cannot be used, and `KVCanaryError` when no port can be had.
    """

    def __init__(self, control: Control, settings: Settings, *, rank: int = 0) -> None:
        if settings.token_file is not None:
            check_token_file(settings.token_file)
        wanted = settings.port + rank if settings.port else 0
        sock, skipped = bind_socket(settings.host, wanted)
        self.port: int = sock.getsockname()[1]
        host = settings.host if ":" not in settings.host else f"[{settings.host}]"
        self.target = f"{host}:{self.port}"
        self.url = f"http://{_WILDCARDS.get(host, host)}:{self.port}"
        self.notice: str | None = None
        if skipped:
            self.notice = f"port {wanted} is in use; the canary answers on {self.url} instead (see /v1/targets)"
            logger.error(self.notice)
        self._targets = LocalTargets(self.target, rank)
        self._server = HttpServer(build_app(control, settings=settings, targets=self._targets.listed), sock)
        self._server.start()
        logger.info("canary API on %s", self.url)

    def stop(self) -> None:
        self._targets.remove()
        self._server.stop()

    def abandon(self) -> None:
        """In a forked child: the parent goes on to serve, the child holds nothing of it."""
        self._server.abandon()
