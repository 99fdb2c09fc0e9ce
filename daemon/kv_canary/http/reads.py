"""What people and programs read: status, groups, settings, incidents, sweeps and drills.

Runs on the HTTP thread; every answer comes from one snapshot, so it is of one moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import FastAPI, Query

from kv_canary.commands import Control
from kv_canary.errors import NotFoundError
from kv_canary.http.models import (
    CanaryAnswer,
    DrillsAnswer,
    GroupAnswer,
    GroupsAnswer,
    IncidentsAnswer,
    StatusAnswer,
    SweepAnswer,
    SweepsAnswer,
)
from kv_canary.http.problems import reads
from kv_canary.snapshot import Drill, GroupSnapshot, Incident, Snapshot

PAGE_LIMIT, PAGE_DEFAULT = 1000, 100


class _Identified(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=_Identified)


def add_read_routes(app: FastAPI, control: Control) -> None:
    @app.get("/v1/status", responses=reads(), tags=["state"])
    async def status() -> StatusAnswer:
        """Everything in one document."""
        return StatusAnswer.of(control.snapshot())

    @app.get("/v1/canary", responses=reads(), tags=["switches"])
    async def canary() -> CanaryAnswer:
        """The master switch."""
        return CanaryAnswer.model_validate(control.snapshot())

    @app.get("/v1/groups", responses=reads(), tags=["switches"])
    async def groups() -> GroupsAnswer:
        """All canary groups."""
        return GroupsAnswer(groups=[GroupAnswer.of(group) for group in control.snapshot().groups])

    @app.get("/v1/groups/{group}", responses=reads(404, 422), tags=["switches"])
    async def one_group(group: str) -> GroupAnswer:
        """One canary group."""
        return GroupAnswer.of(find_group(control.snapshot(), group))

    @app.get("/v1/settings", responses=reads(), tags=["settings"])
    async def settings() -> dict[str, Any]:
        """All settings, spelled the way they are read."""
        return control.snapshot().settings.as_json()

    @app.get("/v1/incidents", responses=reads(404, 422), tags=["incidents"])
    async def incidents(
        after: Annotated[str, Query(description="Only incidents later than the one of this id.")] = "",
        limit: Annotated[
            int, Query(ge=1, le=PAGE_LIMIT, description="How many incidents one answer has at most.")
        ] = PAGE_DEFAULT,
        newest: Annotated[bool, Query(description="The newest ones that there are, instead of the oldest.")] = False,
    ) -> IncidentsAnswer:
        """Incidents that are kept, the oldest first; `next` leads to the following page."""
        snapshot = control.snapshot()
        start = snapshot.incidents.index(find_incident(snapshot, after)) + 1 if after else 0
        if newest:
            start = max(start, len(snapshot.incidents) - limit)
        page = snapshot.incidents[start : start + limit]
        more = start + limit < len(snapshot.incidents)
        return IncidentsAnswer(incidents=list(page), next=page[-1].id if more else None, total=snapshot.incidents_total)

    @app.get("/v1/incidents/{incident}", responses=reads(404, 422), tags=["incidents"])
    async def one_incident(incident: str) -> Incident:
        """One incident."""
        return find_incident(control.snapshot(), incident)

    @app.get("/v1/sweeps", responses=reads(), tags=["sweeps"])
    async def sweeps() -> SweepsAnswer:
        """Sweeps that somebody asked for."""
        return SweepsAnswer(sweeps=[SweepAnswer.of(sweep) for sweep in control.snapshot().sweeps])

    @app.get("/v1/sweeps/{sweep}", responses=reads(404, 422), tags=["sweeps"])
    async def one_sweep(sweep: str) -> SweepAnswer:
        """Progress of one sweep."""
        return SweepAnswer.of(_find("sweep", sweep, control.snapshot().sweeps))

    @app.get("/v1/drills", responses=reads(), tags=["drills"])
    async def drills() -> DrillsAnswer:
        """Drills, the automatic ones included."""
        return DrillsAnswer(drills=list(control.snapshot().drills))

    @app.get("/v1/drills/{drill}", responses=reads(404, 422), tags=["drills"])
    async def one_drill(drill: str) -> Drill:
        """How one drill went."""
        return _find("drill", drill, control.snapshot().drills)


def find_group(snapshot: Snapshot, name: str) -> GroupSnapshot:
    group = snapshot.group(name)
    if group is None:
        known = ", ".join(group.name for group in snapshot.groups) or "none"
        raise NotFoundError(f"no group {name!r}; groups: {known}")
    return group


def find_incident(snapshot: Snapshot, name: str) -> Incident:
    return _find("incident", name, snapshot.incidents)


def _find(what: str, name: str, kept: Iterable[T]) -> T:
    for item in kept:
        if item.id == name:
            return item
    raise NotFoundError(f"no {what} {name!r} is kept; GET /v1/{what}s lists those that are")
