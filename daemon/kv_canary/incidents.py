"""Incidents: a bounded ring in memory and, if wanted, a JSON Lines file with rotation. Used by the canary thread alone.

The file gets a line for every incident, and one more with the same id when its reaction is known.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, replace
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from kv_canary.snapshot import Incident

logger = logging.getLogger("kv_canary")


class _RaisingHandler(RotatingFileHandler):
    """A rotating file that reports a failed write to its caller instead of printing it on the host's standard error."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        raise


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

    def set_reaction(self, incident_id: str, reaction: str) -> None:
        if incident := self._ring.get(incident_id):
            self._ring[incident_id] = replace(incident, reaction=reaction)
            self._published = None
            self._write(self._ring[incident_id])

    def published(self) -> tuple[Incident, ...]:
        """The ring as an immutable value; the same object as long as nothing changed."""
        if self._published is None:
            self._published = tuple(self._ring.values())
        return self._published

    def close(self) -> None:
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
