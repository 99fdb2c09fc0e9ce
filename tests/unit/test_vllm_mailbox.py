"""The way from a vLLM worker back to the scheduler: whole messages, in order, from this user only, and nobody waits."""

from __future__ import annotations

import multiprocessing
import socket
import sys
import threading
from typing import Any

import pytest

from kv_canary_vllm import mailbox as module
from kv_canary_vllm.mailbox import Mailbox, Uplink


@pytest.fixture
def mailbox(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    box = Mailbox()
    yield box
    box.close()


@pytest.fixture
def uplink(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that does not know that the mailbox is in its own process."""
    monkeypatch.setattr(module, "_here", {})
    end = Uplink()
    yield end
    end.close()


def test_messages_of_a_worker_in_the_same_process_need_no_socket(mailbox: Mailbox) -> None:
    uplink = Uplink()
    uplink.send({"ask": "tables"})
    uplink.connect(mailbox.address)
    uplink.send({"ask": "off"})
    assert mailbox.take() == [{"ask": "tables"}, {"ask": "off"}]
    assert mailbox.take() == []


def test_messages_arrive_whole_and_in_order(mailbox: Mailbox, uplink: Uplink) -> None:
    assert uplink.send({"n": -1})  # kept until it is known where to
    uplink.connect(mailbox.address)
    for number in range(50):
        assert uplink.send({"n": number})
    assert [message["n"] for message in mailbox.take()] == list(range(-1, 50))


def _ask_from_elsewhere(address: str) -> None:
    uplink = Uplink()
    uplink.connect(address)
    uplink.send({"ask": "quarantine", "pages": [[3, "inc-1"]]})


def test_another_process_is_heard_even_when_it_has_gone(mailbox: Mailbox) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_ask_from_elsewhere, args=(mailbox.address,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert mailbox.take() == [{"ask": "quarantine", "pages": [[3, "inc-1"]]}]
    assert mailbox.take() == []


def test_what_does_not_fit_waits_for_room_and_nobody_blocks(mailbox: Mailbox, uplink: Uplink) -> None:
    """An idle scheduler takes nothing: the socket fills up, and the rest is kept."""
    uplink.connect(mailbox.address)
    for number in range(2000):
        assert uplink.send({"n": number, "filler": "x" * 500})
    seen: list[int] = []
    while found := mailbox.take():
        seen += [message["n"] for message in found]
        uplink.flush()
    assert seen == list(range(2000))


def test_a_scheduler_on_another_machine_is_not_heard(uplink: Uplink) -> None:
    uplink.connect("kv-canary-nobody-listens-here")
    assert uplink.send({"ask": "tables"}) is False


def test_what_is_no_message_is_passed_over(mailbox: Mailbox) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect("\0" + mailbox.address)
        for data in (b"no json", b"[1]", b"\xff\xfe", b'{"ask": "off"}'):
            stranger.send(data)
        assert mailbox.take() == [{"ask": "off"}]


def test_only_the_same_user_is_heard(mailbox: Mailbox, uplink: Uplink, monkeypatch: pytest.MonkeyPatch) -> None:
    uplink.connect(mailbox.address)
    uplink.send({"ask": "off"})
    monkeypatch.setattr(module.os, "getuid", lambda: 4242)
    assert mailbox.take() == []


def test_many_threads_may_send_at_once(mailbox: Mailbox, uplink: Uplink) -> None:
    uplink.connect(mailbox.address)
    threads = [
        threading.Thread(target=lambda start=start: [uplink.send({"n": start + n}) for n in range(100)])
        for start in range(0, 400, 100)
    ]
    for thread in threads:
        thread.start()
    seen: list[int] = []
    while any(thread.is_alive() for thread in threads) or len(seen) < 400:
        uplink.flush()
        seen += [message["n"] for message in mailbox.take()]
    assert sorted(seen) == list(range(400))


@pytest.mark.parametrize("inside", [True, False], ids=["same process", "socket"])
def test_nothing_is_lost_or_turned_round_while_the_connection_is_made(
    mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    """The canary thread sends at the very moment at which the engine's thread learns where to."""
    if not inside:
        monkeypatch.setattr(module, "_here", {})
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            uplink = Uplink()
            sender = threading.Thread(target=lambda end=uplink: [end.send({"n": n}) for n in range(30)])
            sender.start()
            uplink.connect(mailbox.address)
            sender.join()
            seen: list[int] = []
            while found := mailbox.take():
                seen += [message["n"] for message in found]
            uplink.close()
            mailbox.take()
            assert seen == list(range(30))
    finally:
        sys.setswitchinterval(switch)
