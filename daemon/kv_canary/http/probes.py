"""What machines poll: metrics, health, readiness and scrape targets, and the plain page for a person at `/`.

Runs on the HTTP thread; every answer comes from one snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from html import escape
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse

from kv_canary.clock import Clock
from kv_canary.commands import Control
from kv_canary.http.models import HealthAnswer, TargetGroup
from kv_canary.http.problems import ProblemError, reads
from kv_canary.metrics import metrics_registry
from kv_canary.snapshot import Snapshot

TICK_LIMIT_SECONDS = 10.0
METRICS_TYPES = ("text/plain", "application/openmetrics-text")
LINKS = ("status", "groups", "incidents", "sweeps", "drills", "settings")

_TEXTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {media_type: {"schema": {"type": "string"}} for media_type in METRICS_TYPES}}
}


def add_probe_routes(app: FastAPI, control: Control, clock: Clock, targets: Callable[[], list[str]] | None) -> None:
    from prometheus_client.exposition import choose_encoder

    registry = metrics_registry(control.snapshot)

    @app.get("/metrics", response_class=Response, responses=reads() | _TEXTS, tags=["probes"])
    async def metrics(request: Request) -> Response:
        """Prometheus text, or OpenMetrics (with exemplars) if the Accept header asks for it."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"Content-Type": content_type})

    @app.get("/healthz", responses=reads(), tags=["probes"])
    async def healthz() -> HealthAnswer:
        """200 while the canary thread ticks."""
        snapshot = control.snapshot()
        if (reason := why_not_healthy(snapshot, clock.time())) is not None:
            raise ProblemError(503, reason, state=snapshot.state)
        return HealthAnswer(state=snapshot.state)

    @app.get("/readyz", responses=reads(), tags=["probes"])
    async def readyz() -> HealthAnswer:
        """200 when a group is attached and the canary is running."""
        snapshot = control.snapshot()
        if (reason := why_not_ready(snapshot)) is not None:
            raise ProblemError(503, reason, state=snapshot.state)
        return HealthAnswer(state=snapshot.state)

    @app.get("/v1/targets", responses=reads(), tags=["probes"])
    async def list_targets() -> list[TargetGroup]:
        """The sidecars of all local ranks, for Prometheus http_sd."""
        found = await asyncio.to_thread(targets) if targets is not None else _own_target(control.snapshot())
        return [TargetGroup(targets=found, labels={})] if found else []

    @app.get("/", response_class=HTMLResponse, responses=reads(), tags=["probes"])
    async def page() -> HTMLResponse:
        """The state in words, and where to read on."""
        return HTMLResponse(_page(control.snapshot()))


def why_not_healthy(snapshot: Snapshot, now: float) -> str | None:
    if snapshot.state == "failed":
        return f"the canary failed: {snapshot.reason or 'no reason known'}; the engine goes on without it"
    silence = now - snapshot.tick_at
    if silence >= TICK_LIMIT_SECONDS:
        return f"the canary thread last ticked {silence:.1f} s ago, the limit is {TICK_LIMIT_SECONDS:g} s"
    return None


def why_not_ready(snapshot: Snapshot) -> str | None:
    if snapshot.state != "running":
        return f"the canary is {snapshot.state}" + (f": {snapshot.reason}" if snapshot.reason else "")
    if not snapshot.groups:
        return "no canary group is attached" + (f": {snapshot.reason}" if snapshot.reason else "")
    return None


def _own_target(snapshot: Snapshot) -> list[str]:
    return [urlsplit(snapshot.url).netloc] if snapshot.url else []


def _page(snapshot: Snapshot) -> str:
    """Needs nothing from elsewhere and runs no script: the strictest content policy holds."""
    reason = f": {snapshot.reason}" if snapshot.reason else ""
    facts = (
        f"{snapshot.engine} {snapshot.engine_version} on {snapshot.device}, rank {snapshot.rank}, pid {snapshot.pid}",
        f"state: {snapshot.state}{reason}; switched {'on' if snapshot.enabled else 'off'}",
        *(f"group {group.name} ({group.kind}): {'on' if group.enabled else 'off'}" for group in snapshot.groups),
        f"incidents since the start: {snapshot.incidents_total}",
    )
    lines = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    paths = (*(f"/v1/{link}" for link in LINKS), "/metrics", "/openapi.json")
    links = "".join(f'<li><a href="{path}">{path}</a></li>' for path in paths)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>KV Canary</title></head>'
        f"<body><h1>KV Canary {escape(snapshot.version)}</h1><ul>{lines}</ul>"
        f"<h2>Read on</h2><ul>{links}</ul></body></html>"
    )
