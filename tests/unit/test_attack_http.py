"""Clients that mean harm: the server answers others, takes up no more than its share, and writes no log for them."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from builders.guarded_pool import guarded_pool, wait_for
from builders.hostile import HEAD, KINDS, connect, under_attack
from builders.snapshots import make_incident
from kv_canary.http import connection as connection_module
from kv_canary.http import pace as pace_module
from kv_canary.http.connection import REQUEST_LIMIT, WAITING_LIMIT
from kv_canary.http.pace import LONGEST_SLEEP_SECONDS, Pace, PacedSelector

SPARE = 32  # connections on their way in or out, and what this process opens besides


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def served() -> Iterator[tuple[Any, str]]:
    with guarded_pool(served=True) as (sidecar, _):
        url = sidecar.settle().url
        assert url is not None
        yield sidecar, url


@pytest.mark.parametrize("kind", KINDS)
def test_others_are_answered_and_nothing_piles_up(
    served: tuple[Any, str], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Answered, or refused by a 503 when the hostile keep every place busy; a log has nothing to say of it."""
    sidecar, url = served
    files, threads = open_files(), threading.active_count()
    most, answers = 0, []
    with under_attack(kind, port_of(url)):
        for _ in range(4):
            with httpx.Client(trust_env=False, timeout=20) as client:
                answers.append(client.get(f"{url}/v1/canary").status_code)
            most = max(most, open_files() - files)
    assert set(answers) <= {200, 503}
    assert most <= REQUEST_LIMIT + WAITING_LIMIT + SPARE
    assert threading.active_count() <= threads + 2
    wait_for(lambda: httpx.get(f"{url}/v1/canary", trust_env=False, timeout=20).status_code == 200)
    wait_for(lambda: open_files() <= files + 2, 60, "what the hostile held is let go of")
    snapshot = sidecar.settle()
    assert (snapshot.errors, snapshot.incidents) == ({}, ())
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_connections_without_a_request_never_keep_others_out(served: tuple[Any, str]) -> None:
    """The one that waits longest makes place: a thousand of them, and each question is still answered."""
    _, url = served
    held = []
    for number in range(1000):
        held.append(connect(port_of(url)))
        if number % 100 == 99:
            assert httpx.get(f"{url}/v1/canary", trust_env=False, timeout=20).status_code == 200
    for one in held:
        one.close()


@pytest.mark.parametrize("drip", [b"", b"x"], ids=["silent", "a byte now and then"])
def test_a_head_that_does_not_end_is_cut_off(
    served: tuple[Any, str], drip: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time runs from the beginning, not from the newest byte; after an answer it runs anew."""
    monkeypatch.setattr(connection_module, "HEAD_SECONDS", 0.2)
    with connect(port_of(served[1])) as sock:
        sock.settimeout(20)
        for _ in range(2):
            sock.sendall(HEAD + b"\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += sock.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
        try:
            while not drip or sock.send(drip):
                sock.settimeout(0.02 if drip else 20)
                try:
                    if not sock.recv(65536):
                        break
                except TimeoutError:
                    continue
        except ConnectionError:
            pass


def test_an_answer_that_nobody_takes_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is another's: streams that nobody reads do not use up the streams."""
    monkeypatch.setattr(connection_module, "STALL_SECONDS", 0.2)
    with guarded_pool(traffic=False, served=True) as (sidecar, _):
        url = sidecar.settle().url
        for number in range(300):
            sidecar._call(lambda n=number: sidecar._canary._incidents.add(make_incident(n, summary="x" * 100_000)))
        wait_for(lambda: len(sidecar.settle().incidents) == 300)
        with socket.socket() as sock:
            sock.connect(("127.0.0.1", port_of(url)))
            sock.sendall(b"GET /v1/incidents?limit=300 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert sock.recv(12) == b"HTTP/1.1 200"
            wait_for(lambda: not _is_connected(sock), 20, "the connection is cut")


def _is_connected(sock: socket.socket) -> bool:
    state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state == 1


def test_the_loop_spends_no_more_than_its_share() -> None:
    """A stock first, then a share, whatever a turn costs; and what it did not spend is not saved up without end."""
    pace = Pace(share=0.1, stock_seconds=0.25, now=0.0, spent=0.0)
    now = spent = 0.0
    while now < 100:
        now, spent = now + 0.003, spent + 0.003
        now += pace.sleep_seconds(now, spent)
    assert spent == pytest.approx(0.25 + 0.1 * now, rel=0.01)
    now += 1000
    assert pace.sleep_seconds(now, spent + 0.25) == pytest.approx(0.25)
    assert pace.sleep_seconds(now, spent + 60.25) == pytest.approx(600)


def test_a_turn_within_the_stock_is_followed_by_a_pause_as_long() -> None:
    pace = Pace(share=0.1, stock_seconds=0.25, now=0.0, spent=0.0)
    assert pace.sleep_seconds(1.0, 0.001) == pytest.approx(0.001)
    assert pace.sleep_seconds(2.0, 0.001) == 0


def test_every_turn_of_the_loop_is_paced() -> None:
    slept: list[float] = []
    pace = Pace(share=0.1, stock_seconds=0.0, now=time.monotonic(), spent=time.thread_time())
    with PacedSelector(pace, sleep=slept.append) as selector:
        sum(range(1_000_000))
        selector.select(0)
    assert len(slept) == 1


def test_a_loop_in_debt_looks_at_no_socket_but_hears_of_its_end() -> None:
    """However much a turn has cost: the sleep is cut short, for the timers, and the requests wait on."""
    slept: list[float] = []
    end: list[bool] = []
    pace = Pace(share=0.1, stock_seconds=0.0, now=time.monotonic(), spent=time.thread_time() - 60)
    here, there = socket.socketpair()
    with here, there, PacedSelector(pace, ends=lambda: bool(end), sleep=slept.append) as selector:
        selector.register(here, selectors.EVENT_READ)
        there.send(b"x")
        assert selector.select(0) == []
        assert selector.select(0) == []
        assert slept == [LONGEST_SLEEP_SECONDS] * 2
        end.append(True)
        assert [key.fileobj for key, _ in selector.select(0)] == [here]
        assert len(slept) == 2


def test_a_server_in_debt_answers_nobody_and_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_module, "SHARE", 1e-6)
    monkeypatch.setattr(pace_module, "STOCK_SECONDS", 0.1)
    with guarded_pool(traffic=False, served=True) as (sidecar, _):
        url = sidecar.settle().url
        with httpx.Client(trust_env=False, timeout=1) as client, pytest.raises(httpx.TimeoutException):
            [client.get(f"{url}/metrics") for _ in range(1000)]
        assert "kv-canary-http" in {thread.name for thread in threading.enumerate()}
        sidecar.detach()
        assert "kv-canary-http" not in {thread.name for thread in threading.enumerate()}
