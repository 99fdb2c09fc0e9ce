"""Clients that mean harm, each kind a generator: every `next` is one more blow. As a program it strikes until it is
ended: `python hostile.py KIND PORT`; it needs nothing but Python, and never waits long for an answer.
"""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HEAD = b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\n"
WRITE = b"PUT /v1/canary HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SOCKETS = 1000
ERRORS = (OSError, TimeoutError)


def connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=5)
    sock.settimeout(0.05)
    return sock


def send(sock: socket.socket, data: bytes) -> bool:
    """False when the other side has hung up or takes no more."""
    try:
        sock.sendall(data)
    except ERRORS:
        return False
    return True


def idle(port: int) -> Iterator[None]:
    """A thousand connections that never say anything; those that were cut off come again."""
    held: list[socket.socket] = []
    while True:
        with contextlib.suppress(*ERRORS):
            held.append(connect(port))
        while len(held) > SOCKETS:
            held.pop(0).close()
        yield


def slow(port: int) -> Iterator[None]:
    """Slowloris: hundreds of requests whose heads come a byte at a time and never end."""
    held: list[socket.socket] = []
    while True:
        if len(held) < 200:
            with contextlib.suppress(*ERRORS):
                held.append(connect(port))
                send(held[-1], HEAD)
        else:
            sock = held.pop(0)
            if send(sock, b"x"):
                held.append(sock)
            else:
                sock.close()
        yield


def slow_bodies(port: int) -> Iterator[None]:
    """Writes that promise a body and deliver a byte of it now and then."""
    held: list[socket.socket] = []
    while True:
        if len(held) < 200:
            with contextlib.suppress(*ERRORS):
                held.append(connect(port))
                send(held[-1], WRITE + b"Content-Length: 60000\r\n\r\n{")
        else:
            sock = held.pop(0)
            if send(sock, b" "):
                held.append(sock)
            else:
                sock.close()
        yield


def huge_heads(port: int) -> Iterator[None]:
    while True:
        with contextlib.suppress(*ERRORS), connect(port) as sock:
            send(sock, HEAD + b"X: " + b"x" * (4 << 20))
        yield


def huge_bodies(port: int) -> Iterator[None]:
    """One with its size announced, one in chunks without end, one that goes with a read."""
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    while True:
        for head, piece in ((WRITE + b"Content-Length: 99999999\r\n\r\n", b"x" * 65536),
                            (WRITE + b"Transfer-Encoding: chunked\r\n\r\n", chunk),
                            (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunk)):  # fmt: skip
            with contextlib.suppress(*ERRORS), connect(port) as sock:
                send(sock, head) and all(send(sock, piece) for _ in range(32))
            yield


def pipelining(port: int) -> Iterator[None]:
    """Thousands of requests on one connection, and not one answer is read."""
    while True:
        with contextlib.suppress(*ERRORS), connect(port) as sock:
            for _ in range(50):
                if not send(sock, (HEAD + b"\r\n") * 100):
                    break
                yield
        yield


def half_closed(port: int) -> Iterator[None]:
    """Whole and half requests from clients that will not speak again but keep the line."""
    held: list[socket.socket] = []
    while True:
        for request in (HEAD + b"\r\n", HEAD, WRITE + b"Content-Length: 20\r\n\r\n{"):
            with contextlib.suppress(*ERRORS):
                sock = connect(port)
                held.append(sock)
                send(sock, request)
                sock.shutdown(socket.SHUT_WR)
        while len(held) > SOCKETS:
            held.pop(0).close()
        yield


def deaf(port: int) -> Iterator[None]:
    """Streams of incidents, and large answers, that nobody takes off the socket."""
    held: list[socket.socket] = []
    while True:
        with contextlib.suppress(*ERRORS):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(0.05)
            sock.connect(("127.0.0.1", port))
            held.append(sock)
            send(sock, b"GET /v1/incidents/stream?after=none HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while len(held) > SOCKETS:
            held.pop(0).close()
        yield


def garbage(port: int) -> Iterator[None]:
    """What is no HTTP, before, in the middle of and after a request."""
    blows = (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
        b"nonsense\r\n\r\n",
        HEAD + b"\r\n\x00\x01nonsense\r\n\r\n",
        WRITE + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        WRITE + b"Content-Length: 20\r\n\r\n{}" + HEAD + b"\r\n",
        WRITE + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n",
        HEAD + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n",
        b"GET /v1/incidents/stream HTTP/1.1\r\nHost: localhost\r\n\r\nnonsense\r\n\r\n",
    )
    while True:
        for blow in blows:
            with contextlib.suppress(*ERRORS), connect(port) as sock:
                send(sock, blow)
                if select.select([sock], [], [], 0.02)[0]:
                    sock.recv(65536)
            yield


def greedy(port: int) -> Iterator[None]:
    """Every answer is taken, and asked for again at once, on eight connections."""
    held: list[socket.socket] = []
    while True:
        while len(held) < 8:
            with contextlib.suppress(*ERRORS):
                held.append(connect(port))
                send(held[-1], HEAD + b"\r\n")
        for sock in select.select(held, [], [], 0.05)[0]:
            with contextlib.suppress(*ERRORS):
                if sock.recv(1 << 20) and send(sock, HEAD + b"\r\n"):
                    continue
            held.remove(sock)
            sock.close()
        yield


KINDS: dict[str, Callable[[int], Iterator[None]]] = {
    kind.__name__: kind
    for kind in (
        idle,
        slow,
        slow_bodies,
        huge_heads,
        huge_bodies,
        pipelining,
        half_closed,
        deaf,
        garbage,
        greedy,
    )
}


@contextmanager
def under_attack(kind: str, port: int) -> Iterator[None]:
    """A process strikes as fast as it can, from its first blow on until the end of the block."""
    command = [sys.executable, __file__, kind, str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield
        assert process.poll() is None, f"{kind} gave up"
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    kind, port = sys.argv[1], int(sys.argv[2])
    for number, _ in enumerate(KINDS[kind](port)):
        if number == 200:
            print("it goes on", flush=True)
        time.sleep(0.0005)


if __name__ == "__main__":
    main()
