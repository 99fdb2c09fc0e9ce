"""Incidents: a bounded ring in memory and, if wanted, a JSON Lines file with rotation. Used by the canary thread alone.

The file gets a line for every incident, and one more with the same id when its reaction is known or more pages joined
it.
"""

from __future__ import annotations

import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from kv_canary.snapshot import Incident

logger = logging.getLogger("kv_canary")


class _RaisingHandler(RotatingFileHandler):
    """A rotating file that reports a failed write to its caller instead of printing it on the host's standard error.

    It follows its path: a file that was removed or moved away is begun anew. After a failed write it is opened again,
    so that nothing piles up in a buffer, and half a line that was left is ended before the next one.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is not None and not self._is_where_it_was(self.stream):
            self._let_go()
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        self._let_go()
        raise

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        if os.path.isfile(self.baseFilename):
            with suppress(OSError), open(self.baseFilename, "rb") as written:
                written.seek(-1, os.SEEK_END)  # an error when it is empty
                if written.read(1) != b"\n":
                    stream.write("\n")
        return stream

    def _is_where_it_was(self, stream: TextIOWrapper) -> bool:
        try:
            return os.path.samestat(os.stat(self.baseFilename), os.fstat(stream.fileno()))
        except OSError:
            return False

    def _let_go(self) -> None:
        stream, self.stream = self.stream, None
        if stream is not None:
            with suppress(OSError):
                stream.close()


class IncidentLog:
    """The newest `capacity` incidents, oldest first, and how many there ever were."""

    def __init__(
        self,
        capacity: int,
        *,
        path: Path | None = None,
        maximum_bytes: int = 16 << 20,
        backups: int = 4,
        on_error: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._ring: OrderedDict[str, Incident] = OrderedDict()
        self._capacity = capacity
        self._on_error = on_error
        self._file: RotatingFileHandler | None = None
        self.total = 0
        self._published: tuple[Incident, ...] | None = ()
        self._unwritten: set[str] = set()
        if path is not None:
            # opened at the first incident, so a path that cannot be written hurts nobody before there is one
            self._file = _RaisingHandler(
                path, maxBytes=maximum_bytes, backupCount=backups, delay=True, encoding="utf-8"
            )
            self._file.setFormatter(logging.Formatter("%(message)s"))

    def next_id(self) -> str:
        return f"inc-{self.total + 1:06d}"

    def add(self, incident: Incident) -> None:
        self.total += 1
        self._ring[incident.id] = incident
        while len(self._ring) > self._capacity:
            self._ring.popitem(last=False)
        self._published = None
        self._write(incident)

    def get(self, incident_id: str) -> Incident | None:
        """As long as it is kept."""
        return self._ring.get(incident_id)

    def update(self, incident: Incident) -> None:
        """More is known of an incident that is kept: its place stays. The file hears of it with `settle`."""
        if incident.id in self._ring:
            self._ring[incident.id] = incident
            self._published = None
            self._unwritten.add(incident.id)

    def settle(self) -> None:
        """Writes a line for each incident that was updated since the last time."""
        while self._unwritten:
            if incident := self._ring.get(self._unwritten.pop()):
                self._write(incident)

    def set_reaction(self, incident_id: str, reaction: str) -> None:
        if incident := self._ring.get(incident_id):
            self._ring[incident_id] = replace(incident, reaction=reaction)
            self._published = None
            self._unwritten.discard(incident_id)
            self._write(self._ring[incident_id])

    def published(self) -> tuple[Incident, ...]:
        """The ring as an immutable value; the same object as long as nothing changed."""
        if self._published is None:
            self._published = tuple(self._ring.values())
        return self._published

    def close(self) -> None:
        self.settle()
        if self._file is not None:
            try:
                self._file.close()  # flushes what a full disk left over
            except OSError as error:
                self._on_error(error)

    def _write(self, incident: Incident) -> None:
        if self._file is None:
            return
        try:
            line = json.dumps(as_json(incident), separators=(",", ":"))
            self._file.handle(logging.makeLogRecord({"msg": line, "levelno": logging.ERROR}))
        except Exception as error:  # noqa: BLE001 - a full disk must not stop the canary
            self._on_error(error)


def as_json(incident: Incident) -> dict[str, Any]:
    """JSON-ready form, the same as the HTTP API's."""
    return asdict(incident)
