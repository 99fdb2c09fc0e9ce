"""What a command runs with and what it gives back; the waiting and the progress bar that commands share."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TextIO

from kv_canary.cli.client import Client, Document
from kv_canary.cli.render import Style, bar, duration, percent, plain
from kv_canary.clock import Clock, SystemClock
from kv_canary.errors import KVCanaryError, UnreachableError

CLEAN, MISMATCH, TROUBLE, INTERRUPTED = 0, 1, 2, 130

POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The world outside: where text goes, what time it is, how waiting is done. Tests bring their own."""

    stdout: TextIO = field(default_factory=lambda: sys.stdout)
    stderr: TextIO = field(default_factory=lambda: sys.stderr)
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    clock: Clock = field(default_factory=SystemClock)
    wait: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One invocation: who answers, and where to say it."""

    client: Client
    surroundings: Surroundings
    style: Style
    json: bool

    def now(self) -> float:
        """Seconds since 1970 by the server's clock, so that ages are right on a machine whose clock is not."""
        server_time = self.client.server_time
        return self.surroundings.clock.time() if server_time is None else server_time

    def read_status(self) -> Document:
        """`/v1/status`; another server's JSON must not pass for a canary on which nothing is wrong."""
        document = self.client.get("/v1/status")
        if "state" not in document or "groups" not in document:
            raise UnreachableError(f"something answers at {self.client.url}, but not KV Canary\ncheck --url")
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command found: the API's document for programs, lines for people, the exit status for both.

    Without a document nothing is printed any more.
    """

    status: int
    document: Document | None
    lines: list[str]


def wait_until_done(
    session: Session, path: str, document: Document, *, is_done: Callable[[Document], bool], limit_seconds: float | None
) -> Document:
    """Polls `path` until `is_done`. Draws a bar on stderr when a person watches and the document says how far it is."""
    clock, stream = session.surroundings.clock, session.surroundings.stderr
    started = clock.monotonic()
    drawn = 0
    try:
        while not is_done(document):
            passed = clock.monotonic() - started
            if limit_seconds is not None and passed >= limit_seconds:
                raise KVCanaryError(
                    f"{path} has not finished within {limit_seconds:g} s; it goes on in the server\n"
                    "kv-canary status shows how far it is; --timeout waits longer"
                )
            if stream.isatty():
                line = _progress_line(document, passed)
                stream.write("\r" + line.ljust(drawn))
                stream.flush()
                drawn = len(line)
            session.surroundings.wait(POLL_SECONDS)
            document = session.client.get(path)
        return document
    finally:
        if drawn:
            stream.write("\r" + " " * drawn + "\r")
            stream.flush()


def _progress_line(document: Document, passed_seconds: float) -> str:
    name = plain(document.get("id", ""))
    progress = document.get("progress")
    if progress is None:
        return f"{name}: {plain(document.get('kind', ''))} drill, {duration(int(passed_seconds))}"
    left = (
        f", {duration(math.ceil(passed_seconds / progress - passed_seconds))} left"
        if progress > 0.01 and passed_seconds > 0
        else ""
    )
    return f"{name} {bar(progress, 40)} {percent(progress):>4}{left}"
