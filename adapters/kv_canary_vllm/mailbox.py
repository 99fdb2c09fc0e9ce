"""The way back: what a worker asks of the scheduler, which may be another process on the same machine.

`Mailbox` is the scheduler's end, `Uplink` a worker's. They are connected by a socket in the abstract name space (no
file to clean up, nothing to mount) whose address travels with each step; only processes of the same user are heard.
Neither end ever waits: the mailbox is emptied when the scheduler begins a step, so an idle engine finds what was asked
in the meantime before it schedules anything. A worker in the scheduler's own process leaves its messages without a
socket: a system call would let go of the GIL that the scheduler shares with the canary thread then.

    tables       tell me every page's state with the next step; I record from then on
    off          I record nothing any more
    quarantine   take these pages out of the prefix cache
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
from collections import deque
from contextlib import suppress
from threading import Lock
from time import monotonic
from typing import Any

_MESSAGE_BYTES = 4096
_WORKERS = 256
_PENDING = 10_000  # messages that a worker keeps while nobody takes them
LOOK_SECONDS = 0.01  # between two looks at the sockets

_here: dict[str, Mailbox] = {}  # the mailboxes of this process, by address


class Mailbox:
    """Used by the scheduler's thread alone, but for `leave`. With `outside` there are workers in other processes."""

    def __init__(self, *, outside: bool = True) -> None:
        self.address = f"kv-canary-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind("\0" + self.address)
        self._listener.listen(_WORKERS)
        self._poll = select.epoll()
        self._poll.register(self._listener.fileno(), select.EPOLLIN)
        self._connections: dict[int, socket.socket] = {}
        self._inside: deque[dict[str, Any]] = deque()
        self._look_at = 0.0 if outside else float("inf")
        _here[self.address] = self

    def leave(self, message: dict[str, Any]) -> None:
        """From a worker of this process; any thread."""
        self._inside.append(message)

    def take(self) -> list[dict[str, Any]]:
        """All messages so far, in each worker's order; the sockets are looked at now and then."""
        messages: list[dict[str, Any]] = []
        while self._inside:
            messages.append(self._inside.popleft())
        now = monotonic()
        if now < self._look_at:
            return messages
        self._look_at = now + LOOK_SECONDS
        while ready := self._poll.poll(0):
            for descriptor, _ in ready:
                if descriptor == self._listener.fileno():
                    self._accept()
                else:
                    self._receive(descriptor, messages)
        return messages

    def close(self) -> None:
        _here.pop(self.address, None)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._poll.close()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            user = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
            if user != os.getuid():
                connection.close()
                return
            self._connections[connection.fileno()] = connection
            self._poll.register(connection.fileno(), select.EPOLLIN)

    def _receive(self, descriptor: int, messages: list[dict[str, Any]]) -> None:
        connection = self._connections[descriptor]
        try:
            while True:
                data = connection.recv(_MESSAGE_BYTES)
                if not data:
                    break
                with suppress(ValueError):
                    message = json.loads(data)
                    if isinstance(message, dict):
                        messages.append(message)
        except BlockingIOError:
            return
        except OSError:
            pass
        self._poll.unregister(descriptor)
        del self._connections[descriptor]
        connection.close()


class Uplink:
    """A worker's end. The engine's thread connects, it and the canary thread send and flush.

    One lock covers all state, so that messages keep their order and none is left behind by a connection that is made
    at that moment. It is held for a call that does not wait.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._socket: socket.socket | None = None
        self._address: str | None = None
        self._pending: deque[bytes] = deque(maxlen=_PENDING)
        self._inside: Mailbox | None = None

    def connect(self, address: str) -> None:
        """To the mailbox of that address; does nothing when it is the same as before."""
        if address != self._address:  # written by the caller's thread alone
            with self._lock:
                self._connect(address)

    def _connect(self, address: str) -> None:
        self._address = address
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._inside = _here.get(address)
        if self._inside is not None:
            while self._pending:
                self._inside.leave(json.loads(self._pending.popleft()))
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            connection.connect("\0" + address)
        except OSError:  # the scheduler runs on another machine
            connection.close()
            return
        self._socket = connection
        self._flush()

    def send(self, message: dict[str, Any]) -> bool:
        """True when the message is on its way, or will be as soon as there is room; False when nobody hears it."""
        with self._lock:
            if self._inside is not None:
                self._inside.leave(message)
                return True
            self._pending.append(json.dumps(message).encode())
            self._flush()
            return self._socket is not None or self._address is None

    def flush(self) -> None:
        """Sends what there was no room for."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        while self._socket is not None:
            try:
                message = self._pending.popleft()
            except IndexError:
                return
            try:
                self._socket.send(message)
            except BlockingIOError:
                self._pending.appendleft(message)
                return
            except OSError:  # the scheduler has gone
                self._socket = None

    def close(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
