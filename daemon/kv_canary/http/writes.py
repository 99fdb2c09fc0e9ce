"""What changes something: each write becomes one command, and its answer is the canary thread's.

Runs on the HTTP thread. The canary thread publishes its snapshot before it resolves a command, so the state that a
write answers with is the one after it.
"""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Annotated, Any

from fastapi import Body, FastAPI, Response

from kv_canary.commands import (
    Command,
    Control,
    PatchSettings,
    RequestDrill,
    RequestSweep,
    SetEnabled,
    SetGroupEnabled,
)
from kv_canary.http.asking import answer_of
from kv_canary.http.models import CanaryAnswer, DrillBody, EnabledBody, GroupAnswer, SweepAnswer, SweepBody
from kv_canary.http.problems import ProblemError, writes
from kv_canary.http.reads import find_group
from kv_canary.settings import Settings, live_settings
from kv_canary.snapshot import Drill

_LOCATION = {"description": "Accepted", "headers": {"Location": {"schema": {"type": "string"}}}}
_CHANGES: dict[str, Any] = {
    "properties": {
        f.name: {"description": f"{f.metadata['help']} Allowed: {f.metadata['allowed']}."}
        for f in fields(Settings)
        if f.metadata["live"]
    },
    "additionalProperties": False,
    "minProperties": 1,
}


def add_write_routes(app: FastAPI, control: Control, timeout_seconds: float) -> None:
    stopping: asyncio.Event = app.state.stopping

    async def carry_out(command: Command) -> Any:
        return await answer_of(control, command, timeout_seconds, stopping)

    @app.put("/v1/canary", responses=writes(), tags=["switches"])
    async def switch_canary(body: EnabledBody) -> CanaryAnswer:
        """The master switch: off, hooks are no-ops and nothing is swept."""
        await carry_out(SetEnabled(enabled=body.enabled))
        return CanaryAnswer.model_validate(control.snapshot())

    @app.patch("/v1/groups/{group}", responses=writes(404), tags=["switches"])
    async def switch_group(group: str, body: EnabledBody) -> GroupAnswer:
        """The switch of one group."""
        find_group(control.snapshot(), group)
        await carry_out(SetGroupEnabled(group=group, enabled=body.enabled))
        return GroupAnswer.of(find_group(control.snapshot(), group))

    @app.patch("/v1/settings", responses=writes(), tags=["settings"])
    async def change_settings(body: Annotated[dict[str, Any], Body(json_schema_extra=_CHANGES)]) -> dict[str, Any]:
        """Changes settings that can change while running: all of the given ones, or none."""
        if not body:
            raise ProblemError(422, "the object is empty; settings that can change: " + ", ".join(live_settings()))
        await carry_out(PatchSettings(changes=body))
        return control.snapshot().settings.as_json()

    @app.post("/v1/sweeps", status_code=202, responses=writes(404) | {202: _LOCATION}, tags=["sweeps"])
    async def start_sweep(response: Response, body: SweepBody | None = None) -> SweepAnswer:
        """Sweeps one group, or all, now."""
        body = body or SweepBody()
        if body.group is not None:
            find_group(control.snapshot(), body.group)
        sweep = await carry_out(RequestSweep(group=body.group))
        response.headers["Location"] = f"/v1/sweeps/{sweep.id}"
        return SweepAnswer.of(sweep)

    @app.post("/v1/drills", status_code=202, responses=writes(404) | {202: _LOCATION}, tags=["drills"])
    async def start_drill(response: Response, body: DrillBody) -> Drill:
        """Injects a fault that the canary has to find."""
        if body.group is not None:
            find_group(control.snapshot(), body.group)
        drill: Drill = await carry_out(RequestDrill(kind=body.kind, group=body.group, alert=body.alert))
        response.headers["Location"] = f"/v1/drills/{drill.id}"
        return drill
