"""`kv-canary watch`: the status screen again and again, until Ctrl-C.

On a terminal it repaints in place; into a file or pipe it appends screens, with `--json` one document a line. A server
that goes away is waited for: a restart is when somebody watches.
"""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from typing import TextIO

from kv_canary.cli.client import Document
from kv_canary.cli.render import moment
from kv_canary.cli.screens import status_screen
from kv_canary.cli.session import CLEAN, MISMATCH, Outcome, Session
from kv_canary.cli.verdict import mismatch_found
from kv_canary.errors import UnreachableError

HOME, CLEAR, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[2J", "\x1b[K", "\x1b[J"


def watch(arguments: Namespace, session: Session) -> Outcome:
    """Never returns by itself but for Ctrl-C; then 1 if any screen showed a mismatch. The first failure is an error."""
    stream, wait = session.surroundings.stdout, session.surroundings.wait
    in_place = stream.isatty() and not session.json
    found, previous = False, None
    try:
        status = session.read_status()
        if in_place:
            stream.write(CLEAR)
        while True:
            found = found or mismatch_found(status)
            if session.json:
                stream.write(json.dumps(status) + "\n")
            else:
                rates = read_rates(previous, status)
                lines = status_screen(status, session.style, session.now(), url=session.client.url, read_rates=rates)
                lines += ["", f"{moment(session.now())}, every {arguments.interval:g} s; Ctrl-C ends"]
                _paint(stream, lines, in_place=in_place)
            stream.flush()
            previous = status
            wait(arguments.interval)
            status = _next_status(session, arguments.interval, in_place=in_place)
    except (KeyboardInterrupt, BrokenPipeError):
        if in_place:
            stream.write("\n")
    return Outcome(status=MISMATCH if found else CLEAN, document=None, lines=[])


def _next_status(session: Session, interval: float, *, in_place: bool) -> Document:
    """The next status; while nobody answers, says so where the person looks and asks again."""
    stream = session.surroundings.stdout if in_place else session.surroundings.stderr
    while True:
        try:
            return session.read_status()
        except UnreachableError as error:
            what = str(error).splitlines()[0]
            _paint(stream, [f"{moment(session.surroundings.clock.time())}  {what}; trying again"], in_place=in_place)
            stream.flush()
            session.surroundings.wait(interval)


def read_rates(previous: Document | None, status: Document) -> dict[str, float | None]:
    """Bytes a second of each group between two documents; None if it cannot be told (the first, a restart, no tick)."""
    before = {group.get("name"): _read_bytes(group) for group in (previous or {}).get("groups") or ()}
    passed = (status.get("tick_at") or 0.0) - ((previous or {}).get("tick_at") or 0.0)
    same = previous is not None and previous.get("started_at") == status.get("started_at")
    rates: dict[str, float | None] = {}
    for group in status.get("groups") or ():
        name, total = str(group.get("name")), _read_bytes(group)
        known = same and passed > 0 and group.get("name") in before and total >= before[group.get("name")]
        rates[name] = (total - before[name]) / passed if known else None
    return rates


def _read_bytes(group: Document) -> int:
    return sum(((group.get("counters") or {}).get("read_bytes") or {}).values())


def _paint(stream: TextIO, lines: list[str], *, in_place: bool) -> None:
    if not in_place:
        stream.write("\n".join(lines) + "\n\n")
        return
    height = shutil.get_terminal_size().lines
    if len(lines) > height - 1:  # one more and the terminal would scroll, and every repaint with it
        lines = [*lines[: height - 2], "... more: kv-canary status"]
    stream.write(HOME + "".join(line + CLEAR_LINE + "\n" for line in lines) + CLEAR_BELOW)
