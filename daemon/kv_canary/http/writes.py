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
from kv_canary.http.models import CanaryAnswer, DrillBody, EnabledBody, GroupAnswer, SweepAnswer, SweepBody
from kv_canary.http.problems import ProblemError, writes
from kv_canary.http.reads import find_group
from kv_canary.settings import Settings, live_settings
from kv_canary.snapshot import Drill

_LOCATION = {"description": "Accepted", "headers": {"Location": {"schema": {"type": "string"}}}}
_CHANGES: dict[str, Any] = {
    "properties": {f.name: {"description": f.metadata["help"]} for f in fields(Settings) if f.metadata["live"]},
    "additionalProperties": False,
    "minProperties": 1,
}


def add_write_routes(app: FastAPI, control: Control, timeout_seconds: float) -> None:
    async def carry_out(command: Command) -> Any:
        return await _answer_of(control, command, timeout_seconds, app.state.stopping)

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


async def _answer_of(control: Control, command: Command, timeout_seconds: float, stopping: asyncio.Event) -> Any:
    """What the canary thread answers; a 503 when it does not within the time, or when this server stops first."""
    name = type(command).__name__
    answer = asyncio.wrap_future(control.submit(command))
    # An answer that comes after the deadline is nobody's any more: looked at here, or asyncio reports it as forgotten.
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({answer, stop}, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()
    if answer.cancelled():
        raise ProblemError(503, f"{name} was withdrawn: the canary is stopping", command=name)
    if answer.done():
        return answer.result()
    if stopping.is_set():
        raise ProblemError(503, f"{name} has no answer yet and this server is stopping", command=name)
    # Not cancelled: the canary thread may be in the middle of it.
    raise ProblemError(
        503,
        f"{name} had no answer from the canary thread within {timeout_seconds:g} s; it may still take effect",
        command=name,
    )
