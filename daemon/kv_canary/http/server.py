"""The HTTP thread: a socket bound beforehand, and uvicorn on it in a daemon thread.

Owns the socket, the thread and its event loop. What clients may take up is limited in `connection` (sockets, time, log
lines) and in `pace` (processor time). Nothing of the host is changed: no signal handlers, no logging configuration
(uvicorn's own `access_log=False` would silence the host's access log), no event loop policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator

import uvicorn
from starlette.types import Receive, Scope, Send

from kv_canary.errors import KVCanaryError
from kv_canary.http import connection
from kv_canary.http.api import CanaryApi
from kv_canary.http.pace import paced_event_loop
from kv_canary.http.problems import LOGGER, problem

# Connections that wait in the kernel, and how many of them one turn of the event loop takes in. Far fewer than may
# wait: whoever asks at once must be heard before so many others have come that its place is given away.
BACKLOG = 128
ACCEPTED_A_TURN = 8
HEADER_LIMIT_BYTES = 16 << 10
KEEP_ALIVE_SECONDS = 5
START_TIMEOUT_SECONDS = 10.0
GRACE_SECONDS = 0.5


def bind_socket(host: str, port: int, *, attempts: int = 20) -> tuple[socket.socket, int]:
    """A listening socket, and how many busy ports were skipped to get it. Port 0 takes any free one.

    Raises `KVCanaryError` when none of `attempts` ports is free, or when the address cannot be bound at all.
    """
    last = min(port + attempts, 1 << 16) if port else 1
    for skipped, candidate in enumerate(range(port, last)):
        try:
            return _listen(host, candidate), skipped
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise KVCanaryError(
                    f"cannot listen on {host} port {candidate}: {error.strerror or error}; set KV_CANARY_HOST to an "
                    "address of this machine and KV_CANARY_PORT to a port that this user may bind"
                ) from error
    raise KVCanaryError(
        f"ports {port} to {last - 1} of {host} are all in use; set KV_CANARY_PORT to a free one, or to 0 for any"
    )


def _listen(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        sock.bind(address)
        # already here: only a listening socket keeps others away when both reuse the address
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


class HttpServer:
    """Serves `app` on `sock` from `start()` to `stop()`. One use only: it cannot be started again."""

    def __init__(self, app: CanaryApi, sock: socket.socket) -> None:
        self._app, self._socket = app, sock
        config = _QuietConfig(
            self._serve_or_refuse,
            interface="asgi3",
            http=connection.Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,  # or the audit log would believe X-Forwarded-For
            server_header=False,
            backlog=ACCEPTED_A_TURN,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=HEADER_LIMIT_BYTES,
        )
        self._server = _Server(config, app.state.stopping)
        self._thread = threading.Thread(target=self._run, name="kv-canary-http", daemon=True)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """Returns once requests are answered; `KVCanaryError` when that does not happen."""
        self._thread.start()
        self._server.settled.wait(START_TIMEOUT_SECONDS)
        if not self._server.started:
            self._server.should_exit = True
            raise KVCanaryError("the HTTP server did not start; the log has the reason")

    def stop(self, timeout: float = 2.0) -> bool:
        """Ends open streams, closes the socket and joins the thread. False when that took over `timeout` seconds."""
        self._server.should_exit = True
        if self._thread.ident is None:
            self._socket.close()
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            # A loop of our own making: the host may have a policy, and `Server.run` of older uvicorn may set one.
            with asyncio.Runner(loop_factory=lambda: paced_event_loop(lambda: self._server.should_exit)) as runner:
                runner.run(self._server.serve(sockets=[self._socket]))
        except (Exception, SystemExit):  # noqa: BLE001  the host's process must not see it
            LOGGER.exception("kv_canary: the HTTP server died; the canary and the engine go on without it")
        finally:
            self._socket.close()
            self._app.shut()
            self._server.settled.set()

    def abandon(self) -> None:
        """In a forked child, which has none of our threads: lets go of the sockets that it inherited.

        Or the port would stay taken, and connections open, as long as the child lives. The numbers stay taken, by
        nothing, so that an object that closes its own later closes nobody else's. Whatever is shared with the parent
        (its epoll, its connections' state) is not touched.
        """
        numbers = [self._socket.fileno()]
        for one in list(self._server.server_state.connections):
            if (transport := getattr(one, "transport", None)) is not None:
                numbers.append(transport.get_extra_info("socket").fileno())
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in numbers:
            if number >= 0:
                os.dup2(nothing, number, inheritable=False)
        os.close(nothing)

    async def _serve_or_refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        # uvicorn's own `limit_concurrency` answers in plain text.
        limit = connection.REQUEST_LIMIT
        if connection.count_requests(self._server.server_state.connections) > limit:
            detail = f"{limit} requests are under way, which is the limit"
            await problem(503, detail, headers={"Connection": "close", "Retry-After": "1"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves signals alone and tells streams to end before it waits for them."""

    def __init__(self, config: uvicorn.Config, stopping: asyncio.Event) -> None:
        super().__init__(config)
        self.settled = threading.Event()
        self._stopping = stopping

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)  # asyncio has made it the number that it accepts in one go
        self.settled.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping.set()
        # A client that does not read keeps its stream waiting: cut off, or uvicorn cancels the task with a traceback.
        cut = asyncio.get_running_loop().call_later(GRACE_SECONDS, self._abort_connections)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    def _abort_connections(self) -> None:
        for one in list(self.server_state.connections):
            if (transport := getattr(one, "transport", None)) is not None:
                transport.abort()


class _QuietConfig(uvicorn.Config):
    def configure_logging(self) -> None:
        """Nothing: the loggers of uvicorn in this process are the host's."""
