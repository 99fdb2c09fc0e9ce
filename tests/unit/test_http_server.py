"""The server in its thread: real sockets, real streams, a real stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from builders.control import FakeControl
from builders.requests import assert_problem
from builders.snapshots import make_incident, make_snapshot
from kv_canary.errors import KVCanaryError
from kv_canary.http import connection as connection_module
from kv_canary.http.api import build_app
from kv_canary.http.server import HttpServer, bind_socket
from kv_canary.http.stream import STREAM_LIMIT, StreamTiming
from kv_canary.settings import Settings

FAST = StreamTiming(poll_seconds=0.01, heartbeat_seconds=0.02)


@contextlib.contextmanager
def serving(control: FakeControl, **options: Any) -> Iterator[tuple[HttpServer, httpx.Client]]:
    sock, _ = bind_socket("127.0.0.1", 0)
    server = HttpServer(build_app(control, **{"settings": Settings(), "stream_timing": FAST} | options), sock)
    server.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=10) as client:
            yield server, client
    finally:
        assert server.stop(timeout=5)


def raw_exchange(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def events(lines: Iterator[str], count: int) -> list[dict[str, str]]:
    """The next `count` events of a stream; comments are left out."""
    found: list[dict[str, str]] = []
    event: dict[str, str] = {}
    while len(found) < count:
        line = next(lines)
        if not line and "data" in event:
            found.append(event)
        if not line:
            event = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            event[name] = value
    return found


# Binding


def test_a_free_port_is_taken_as_it_is() -> None:
    """Port 0 means any free one, and nothing is skipped."""
    sock, skipped = bind_socket("127.0.0.1", 0)
    with sock:
        assert sock.getsockname()[1] > 0
        assert skipped == 0


def test_a_busy_port_is_skipped_and_counted() -> None:
    """The next free port is taken, and the caller learns how far away it is."""
    first, _ = bind_socket("127.0.0.1", 0)
    with first:
        busy = first.getsockname()[1]
        second, skipped = bind_socket("127.0.0.1", busy)
        with second:
            assert second.getsockname()[1] == busy + skipped
            assert skipped >= 1


def test_no_free_port_is_an_error_with_the_way_out() -> None:
    """The message names the ports tried and the setting to change."""
    first, _ = bind_socket("127.0.0.1", 0)
    with first, pytest.raises(KVCanaryError, match=r"all in use; set KV_CANARY_PORT"):
        bind_socket("127.0.0.1", first.getsockname()[1], attempts=1)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_ours_is_an_error_with_the_way_out(host: str) -> None:
    """Neither a foreign address nor an unknown name can be bound: trying other ports would not help."""
    with pytest.raises(KVCanaryError, match="KV_CANARY_HOST"):
        bind_socket(host, 10470)


# Serving


def test_the_server_answers_over_a_real_socket() -> None:
    """Started means answering: a read and a write go through at once."""
    control = FakeControl()
    with serving(control) as (_, client):
        assert client.get("/v1/status").json()["engine"] == "transformers"
        assert client.put("/v1/canary", json={"enabled": False}).json()["enabled"] is False
    assert len(control.commands) == 1


def test_a_large_upload_is_refused_and_the_server_goes_on() -> None:
    """10 MB are refused by a problem that the client can read; the next request is served."""
    control = FakeControl()
    with serving(control) as (_, client):
        headers = {"Content-Type": "application/json"}
        assert_problem(client.put("/v1/canary", content=b"x" * (10 << 20), headers=headers), 413)
        assert_problem(client.put("/v1/canary", content=iter([b"x" * 65536] * 160), headers=headers), 413)
        assert client.get("/v1/canary").status_code == 200
    assert not control.commands


def test_a_body_that_breaks_off_is_not_acted_upon() -> None:
    """A client that dies in the middle has said nothing, even if the half is valid JSON."""
    control = FakeControl()
    head = b"PUT /v1/canary HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    with serving(control) as (server, client):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(head + b'{"enabled": false}')
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
        assert client.get("/v1/canary").json()["enabled"] is True
    assert not control.commands


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 40_000,
    ],
    ids=["no HTTP", "no host", "endless header"],
)
def test_a_malformed_request_is_a_problem_too(request_bytes: bytes) -> None:
    """Even what never reaches the application is answered in the one shape."""
    with serving(FakeControl()) as (server, client):
        head, _, body = raw_exchange(server.port, request_bytes).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"application/problem+json" in head
        assert json.loads(body)["status"] == 400
        assert client.get("/healthz").status_code in (200, 503)


def test_a_request_over_the_limit_gets_a_503_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server never holds more than its share of the process, and says so in the one shape."""
    monkeypatch.setattr(connection_module, "REQUEST_LIMIT", 2)
    with serving(FakeControl()) as (server, client), contextlib.ExitStack() as held:
        for _ in range(2):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            connection.sendall(b"GET /v1/incidents/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert_problem(client.get("/v1/status"), 503, "2 requests")


def test_the_host_process_is_left_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    """Signal handlers, uvicorn's loggers and the event loop policy are the host's; no access log is written."""
    names = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")

    def state() -> list[object]:
        loggers = [logging.getLogger(name) for name in names]
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        policy: list[object] = [type(asyncio.get_event_loop_policy())]
        return policy + handlers + [(logger.level, list(logger.handlers), logger.propagate) for logger in loggers]

    before = state()
    with serving(FakeControl()) as (_, client):
        client.get("/v1/status")
        assert state() == before
    assert state() == before
    assert not [record for record in caplog.records if record.name == "uvicorn.access"]


def test_a_forwarded_address_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    """The audit log has the peer of the connection, not what a header claims."""
    caplog.set_level(logging.INFO, "kv_canary.audit")
    with serving(FakeControl()) as (_, client):
        client.put("/v1/canary", json={"enabled": True}, headers={"X-Forwarded-For": "8.8.8.8"})
    lines = [record.getMessage() for record in caplog.records if record.name == "kv_canary.audit"]
    assert lines == ["PUT /v1/canary 200 from 127.0.0.1"]


# Streams


def test_incidents_are_streamed_as_they_appear() -> None:
    """What was there before is not repeated; each new incident comes once, in order, with its id."""
    control = FakeControl(make_snapshot(incidents=(make_incident(1),)))
    with serving(control) as (_, client), client.stream("GET", "/v1/incidents/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        while next(lines) != ": connected":
            pass
        control.publish(incidents=(make_incident(1), make_incident(2), make_incident(3)))
        found = events(lines, 2)
        control.publish(incidents=(make_incident(3), make_incident(4)))
        found += events(lines, 1)
    assert [event["id"] for event in found] == ["incident-2", "incident-3", "incident-4"]
    assert {event["event"] for event in found} == {"incident"}
    assert json.loads(found[0]["data"])["page"] == 42


@pytest.mark.parametrize(
    ("headers", "query", "expected"),
    [
        ({"Last-Event-ID": "incident-1"}, "", ["incident-2", "incident-3"]),
        ({}, "?after=incident-2", ["incident-3"]),
        ({"Last-Event-ID": "long-gone"}, "", ["incident-1", "incident-2", "incident-3"]),
    ],
)
def test_a_stream_resumes_after_the_last_event(headers: dict[str, str], query: str, expected: list[str]) -> None:
    """A reconnect loses nothing that is still kept."""
    control = FakeControl(make_snapshot(incidents=tuple(make_incident(n) for n in (1, 2, 3))))
    with (
        serving(control) as (_, client),
        client.stream("GET", f"/v1/incidents/stream{query}", headers=headers) as response,
    ):
        found = events(response.iter_lines(), len(expected))
    assert [event["id"] for event in found] == expected


def test_a_flood_is_cut_off_and_said_to_be() -> None:
    """The first of it, then how many were left out; what comes after is sent again."""
    flood = tuple(make_incident(number) for number in range(1, 41))
    control = FakeControl(make_snapshot(incidents=flood))
    timing = StreamTiming(poll_seconds=0.01, incidents_a_look=3)
    with (
        serving(control, stream_timing=timing) as (_, client),
        client.stream("GET", "/v1/incidents/stream?after=gone") as response,
    ):
        lines = response.iter_lines()
        found = events(lines, 4)
        control.publish(incidents=(*flood, make_incident(41)))
        found += events(lines, 1)
    assert [event["event"] for event in found] == [*["incident"] * 3, "flood", "incident"]
    assert [event["id"] for event in found[:3]] == ["incident-1", "incident-2", "incident-3"]
    assert json.loads(found[3]["data"]) == {"left_out": 37, "after": "incident-3"}
    assert (found[3]["id"], found[4]["id"]) == ("incident-40", "incident-41")


def test_a_silent_stream_has_heartbeats() -> None:
    """Proxies cut connections on which nothing moves."""
    with serving(FakeControl()) as (_, client), client.stream("GET", "/v1/incidents/stream") as response:
        lines = response.iter_lines()
        beats = 0
        while beats < 2:
            beats += next(lines) == ": heartbeat"


def test_streams_are_limited_and_their_places_come_free() -> None:
    """Streams never use up the connections that scrapes need; a client that goes gives its place back."""
    with serving(FakeControl()) as (_, client):
        with contextlib.ExitStack() as opened:
            readers = []  # kept: an abandoned iterator closes its stream
            for _ in range(STREAM_LIMIT):
                readers.append(opened.enter_context(client.stream("GET", "/v1/incidents/stream")).iter_lines())
                assert next(readers[-1])
            assert_problem(client.get("/v1/incidents/stream"), 503, str(STREAM_LIMIT))
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with client.stream("GET", "/v1/incidents/stream") as response:
                if response.status_code == 200:
                    break
        assert response.status_code == 200


# Stopping


def test_stopping_ends_open_streams_quickly_and_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """The server process must be able to end at any time: a watcher does not hold it up."""
    with serving(FakeControl()) as (server, client), client.stream("GET", "/v1/incidents/stream") as response:
        lines = response.iter_lines()
        assert next(lines)
        began = time.monotonic()
        assert server.stop(timeout=5)
        assert time.monotonic() - began < 2
        assert not [line for line in lines if line.startswith("data")]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_stopping_cuts_off_a_client_that_does_not_read(caplog: pytest.LogCaptureFixture) -> None:
    """A full socket keeps a stream waiting for ever; the stop does not wait with it."""
    incidents = tuple(make_incident(n, summary="x" * 100_000) for n in range(200))
    request = b"GET /v1/incidents/stream?after=none HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(FakeControl(make_snapshot(incidents=incidents))) as (server, _), socket.socket() as connection:
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(request)
        assert connection.recv(1024).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        assert server.stop(timeout=5)
        assert time.monotonic() - began < 2
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_stopping_answers_a_write_that_still_waits(caplog: pytest.LogCaptureFixture) -> None:
    """The client gets a problem instead of a broken connection."""
    submitted = threading.Event()

    class Waiting(FakeControl):
        def submit(self, command: Any) -> Any:
            future = super().submit(command)
            submitted.set()
            return future

    answers: list[httpx.Response] = []
    with serving(Waiting(silent=True)) as (server, client):
        write = threading.Thread(target=lambda: answers.append(client.put("/v1/canary", json={"enabled": False})))
        write.start()
        assert submitted.wait(10)
        assert server.stop(timeout=5)
        write.join(10)
    assert_problem(answers[0], 503, "stopping")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_after_a_stop_nobody_listens_and_no_thread_is_left() -> None:
    """The port is free for the next sidecar, and stopping again does no harm."""
    with serving(FakeControl()) as (server, client):
        port = server.port
        assert client.get("/v1/canary").status_code == 200
        assert server.stop()
        assert not server.is_alive
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=10)
    assert "kv-canary-http" not in {thread.name for thread in threading.enumerate()}


def test_a_server_that_never_started_stops_by_closing_its_socket() -> None:
    """A sidecar that fails half-way leaves no socket behind."""
    sock, _ = bind_socket("127.0.0.1", 0)
    assert HttpServer(build_app(FakeControl(), settings=Settings()), sock).stop()
    assert sock.fileno() == -1


def test_a_server_that_cannot_start_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The sidecar gets an error and goes on without HTTP; nothing reaches the host's thread hook."""
    sock, _ = bind_socket("127.0.0.1", 0)
    sock.close()
    with pytest.raises(KVCanaryError, match="did not start"):
        HttpServer(build_app(FakeControl(), settings=Settings()), sock).start()
    assert [record.name for record in caplog.records if record.exc_info] == ["kv_canary.http"]
