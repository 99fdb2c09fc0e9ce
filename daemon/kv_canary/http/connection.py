"""One connection of the HTTP server, on the HTTP thread: uvicorn's, with limits that no client can stretch.

The server lives in the process of an engine, so what clients may take up is bounded whatever they do:

* **Connections.** `WAITING_LIMIT` may wait for their client; one more makes the one go that has waited longest. A
  client that asks at once is never that one, so idle connections, however many, do not keep it out. Over
  `REQUEST_LIMIT` requests under way, the next one gets a 503 (`HttpServer` answers it).
* **Time.** A request head has `HEAD_SECONDS` to arrive, counted from the first moment that the connection waits for
  one, not from its newest byte. A body has its own deadline (`security`). An answer that the client does not take off
  the socket for `STALL_SECONDS` is cut off.
* **Log lines.** What is wrong with a request goes to the client, who sent it, not into the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Iterable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kv_canary.http.problems import LOGGER, problem

REQUEST_LIMIT = 64
WAITING_LIMIT = 64
HEAD_SECONDS = 10.0
STALL_SECONDS = 30.0

_NO_LINGERING = struct.pack("ii", 1, 0)

OUR_FAULTS = LOGGER.getChild("connection")
# uvicorn warns of what is wrong with a request; its errors are exceptions in our application
OUR_FAULTS.addFilter(lambda record: record.levelno != logging.WARNING)


def count_requests(connections: Iterable[asyncio.Protocol]) -> int:
    """Those under way."""
    return sum(isinstance(one, Connection) and not one.waits for one in connections)


class Connection(H11Protocol):
    """Writes no access log, logs under our name, and answers a malformed request with a problem."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.access_log = False
        self.logger = OUR_FAULTS
        self.waits_since = self.loop.time()
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        """No request is under way: it is the client's turn."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()
        if len(self.connections) > WAITING_LIMIT:
            self._make_place()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def handle_events(self) -> None:
        super().handle_events()
        if not self.waits and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def on_response_complete(self) -> None:
        self._wait_for_head()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(STALL_SECONDS, self._cut_off)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def send_400_response(self, msg: str) -> None:
        """Answers, if an answer can still be sent, and ends the connection: there is no telling where a next request
        would begin.
        """
        response = problem(400, msg, headers={"Connection": "close"})
        head = h11.Response(status_code=400, headers=response.raw_headers, reason=b"Bad Request")
        with contextlib.suppress(h11.LocalProtocolError):  # another answer is under way on this connection
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            # whatever works on the request before is told, and sends nothing any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _wait_for_head(self) -> None:
        self.waits_since = self.loop.time()
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._cut_off)

    def _make_place(self) -> None:
        waiting = [other for other in self.connections if isinstance(other, Connection) and other.waits]
        waiting = [other for other in waiting if not other.transport.is_closing()]
        if len(waiting) > WAITING_LIMIT:
            min(waiting, key=lambda other: other.waits_since)._cut_off()

    def _cut_off(self) -> None:
        """At once, here and in the kernel, which otherwise keeps what the client has not taken yet."""
        with contextlib.suppress(OSError):
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
        self.transport.abort()
