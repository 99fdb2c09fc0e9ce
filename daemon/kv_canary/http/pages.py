"""The page map of a group, and one page: what only the canary thread can look up, so it is asked.

Runs on the HTTP thread. A map is kept for a second as the bytes that go out: many viewers cost one build.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode

from fastapi import FastAPI, Response

from kv_canary.commands import Control, LookAtPage, MapPages
from kv_canary.http.asking import answer_of
from kv_canary.http.models import PageMapAnswer
from kv_canary.http.problems import reads
from kv_canary.http.reads import find_group
from kv_canary.snapshot import PageDetails, PageMap

KEPT_SECONDS = 1.0


class _KeptMap:
    """The newest map of one group; while one is being built, all who ask wait for that one."""

    def __init__(self) -> None:
        self.body = b""
        self.good_until = 0.0
        self.building: asyncio.Task[bytes] | None = None


def add_page_routes(app: FastAPI, control: Control, timeout_seconds: float) -> None:
    kept: dict[str, _KeptMap] = {}
    stopping: asyncio.Event = app.state.stopping

    async def build(group: str, entry: _KeptMap) -> bytes:
        try:
            found: PageMap = await answer_of(control, MapPages(group=group), timeout_seconds, stopping)
            entry.body = _encoded(found)
            entry.good_until = asyncio.get_running_loop().time() + KEPT_SECONDS
            return entry.body
        finally:
            entry.building = None

    @app.get(
        "/v1/groups/{group}/pages",
        response_class=Response,
        responses=reads(404, 409, 422) | {200: {"model": PageMapAnswer, "description": "The map"}},
        tags=["pages"],
    )
    async def page_map(group: str) -> Response:
        """State, age and incidents of every page of a group, one byte a cell; at most a second old."""
        find_group(control.snapshot(), group)
        entry = kept.setdefault(group, _KeptMap())
        body = entry.body
        if asyncio.get_running_loop().time() >= entry.good_until:
            if entry.building is None:
                entry.building = asyncio.create_task(build(group, entry))
                # whoever asked may be gone when it fails: looked at here, or asyncio reports it as forgotten
                entry.building.add_done_callback(lambda done: done.cancelled() or done.exception())
            body = await asyncio.shield(entry.building)
        return Response(body, media_type="application/json")

    @app.get("/v1/groups/{group}/pages/{page}", responses=reads(404, 409, 422), tags=["pages"])
    async def one_page(group: str, page: int) -> PageDetails:
        """One page: state, owner, and the age of its verification."""
        find_group(control.snapshot(), group)
        command = LookAtPage(group=group, page=page)
        found: PageDetails = await answer_of(control, command, timeout_seconds, stopping)
        return found


def _encoded(found: PageMap) -> bytes:
    answer = PageMapAnswer(
        group=found.group,
        built_at=found.built_at,
        first_page=found.first_page,
        pages=found.pages,
        pages_per_cell=found.pages_per_cell,
        states=list(found.states),
        age_bounds_seconds=list(found.age_bounds_seconds),
        counts={state: list(counts) for state, counts in found.counts.items()},
        mismatched_pages=found.mismatched_pages,
        drilled_pages=found.drilled_pages,
        cells=b64encode(found.cells).decode("ascii"),
    )
    return answer.model_dump_json().encode("utf-8")
