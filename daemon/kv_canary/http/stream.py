"""Incidents as they appear, as server-sent events.

Runs on the HTTP thread. A stream looks at the snapshot a few times a second, for the canary thread calls nobody. It
ends when the client goes or when `app.state.stopping` is set. In a flood it sends the first incidents of each look, and
one event that says how many it left out.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter

from kv_canary.commands import Control
from kv_canary.http.problems import ProblemError, reads
from kv_canary.snapshot import Incident, Snapshot

STREAM_LIMIT = 16  # far below the connections that the server accepts, so that streams never starve a scrape
_INCIDENT = TypeAdapter(Incident)
_CONTENT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTiming:
    """How often a stream looks for incidents, and how long it stays silent at most."""

    poll_seconds: float = 0.25
    heartbeat_seconds: float = 15.0
    incidents_a_look: int = 16


def add_stream_route(app: FastAPI, control: Control, timing: StreamTiming) -> None:
    stopping: asyncio.Event = app.state.stopping
    open_streams = 0

    async def events(seen: str | None) -> AsyncIterator[bytes]:
        nonlocal open_streams
        open_streams += 1
        try:
            async for event in _events(control, timing, stopping, seen):
                yield event
        finally:
            open_streams -= 1

    # The path is also one that `/v1/incidents/{incident}` would match: this route has to be added before that one.
    @app.get(
        "/v1/incidents/stream",
        response_class=StreamingResponse,
        responses=reads(422) | _CONTENT,
        tags=["incidents"],
    )
    async def stream(
        after: Annotated[str, Query(description="Begin after the incident of this id.")] = "",
        last_event_id: Annotated[str, Header(description="What a reconnecting browser sends; beats `after`.")] = "",
    ) -> StreamingResponse:
        """New incidents as server-sent events (`event: incident`). An `after` that is not kept brings all that are.

        Where there are too many at once, an `event: flood` says how many were left out and after which one.
        """
        if open_streams >= STREAM_LIMIT:
            raise ProblemError(503, f"{STREAM_LIMIT} streams are open, the limit; poll GET /v1/incidents instead")
        incidents = control.snapshot().incidents
        seen = last_event_id or after or (incidents[-1].id if incidents else None)
        return StreamingResponse(events(seen), media_type="text/event-stream")


async def _events(
    control: Control, timing: StreamTiming, stopping: asyncio.Event, seen: str | None
) -> AsyncIterator[bytes]:
    """`seen` is the id of the newest incident that the client has; None when there was none to have."""
    loop = asyncio.get_running_loop()
    yield b"retry: 2000\n\n: connected\n\n"
    last_sent_at = loop.time()
    while not stopping.is_set():
        later = _later_than(control.snapshot(), seen)
        for incident in later[: timing.incidents_a_look]:
            seen, last_sent_at = incident.id, loop.time()
            yield b"id: %s\nevent: incident\ndata: %s\n\n" % (incident.id.encode(), _INCIDENT.dump_json(incident))
        if left_out := len(later[timing.incidents_a_look :]):
            flood = json.dumps({"left_out": left_out, "after": seen}).encode()
            seen = later[-1].id
            yield b"id: %s\nevent: flood\ndata: %s\n\n" % (seen.encode(), flood)
        if loop.time() - last_sent_at >= timing.heartbeat_seconds:
            last_sent_at = loop.time()
            yield b": heartbeat\n\n"
        try:
            await asyncio.wait_for(stopping.wait(), timing.poll_seconds)
        except TimeoutError:
            continue


def _later_than(snapshot: Snapshot, seen: str | None) -> tuple[Incident, ...]:
    """Incidents after `seen`; all that are kept when it is not among them, for then it is older than they are."""
    for index in range(len(snapshot.incidents) - 1, -1, -1):
        if snapshot.incidents[index].id == seen:
            return snapshot.incidents[index + 1 :]
    return snapshot.incidents
