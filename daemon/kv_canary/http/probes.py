"""What machines poll: metrics, health, readiness and scrape targets, and the page for a person at `/`.

Runs on the HTTP thread; every answer comes from one snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse

from kv_canary.clock import Clock
from kv_canary.commands import Control
from kv_canary.http.hosts import host_name, is_wildcard
from kv_canary.http.models import HealthAnswer, TargetGroup
from kv_canary.http.page import status_page
from kv_canary.http.problems import ProblemError, reads
from kv_canary.metrics import metrics_registry
from kv_canary.snapshot import Snapshot

TICK_LIMIT_SECONDS = 10.0
METRICS_TYPES = ("text/plain", "application/openmetrics-text")

_TEXTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {media_type: {"schema": {"type": "string"}} for media_type in METRICS_TYPES}}
}


def add_probe_routes(app: FastAPI, control: Control, clock: Clock, targets: Callable[[], list[str]] | None) -> None:
    from prometheus_client.exposition import choose_encoder

    registry = metrics_registry(control.snapshot)
    status_document = status_page()

    @app.get("/metrics", response_class=Response, responses=reads() | _TEXTS, tags=["probes"])
    async def metrics(request: Request) -> Response:
        """Prometheus text, or OpenMetrics (with exemplars) if the Accept header asks for it."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"Content-Type": content_type})

    @app.get("/healthz", responses=reads(), tags=["probes"])
    async def healthz() -> HealthAnswer:
        """200 while the canary thread ticks."""
        snapshot = control.snapshot()
        if (reason := why_not_healthy(snapshot, clock.monotonic())) is not None:
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
    async def list_targets(request: Request) -> list[TargetGroup]:
        """The sidecars of all local ranks, for Prometheus http_sd; where they listen on every address, by the name that
        this request was sent to.
        """
        found = await asyncio.to_thread(targets) if targets is not None else _own_target(control.snapshot())
        seen = [_as_seen(target, request.headers["host"]) for target in found]
        return [TargetGroup(targets=seen, labels={})] if seen else []

    @app.get("/", response_class=HTMLResponse, responses=reads(), tags=["probes"])
    async def page() -> HTMLResponse:
        """The status page: one document for a person, live over this API."""
        return HTMLResponse(status_document.html, headers=status_document.headers)


def why_not_healthy(snapshot: Snapshot, now: float) -> str | None:
    """`now` is monotonic: a clock that somebody sets neither hides a dead thread nor invents one."""
    if snapshot.state == "failed":
        return f"the canary failed: {snapshot.reason or 'no reason known'}; the engine goes on without it"
    silence = now - snapshot.tick_monotonic
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


def _as_seen(target: str, host_header: str) -> str:
    """`0.0.0.0:10471` asked for under `gpu7:10470` is `gpu7:10471`."""
    host, _, port = target.rpartition(":")
    asked = host_name(host_header)
    if asked is None or not is_wildcard(host.strip("[]")):
        return target
    return f"[{asked}]:{port}" if ":" in asked else f"{asked}:{port}"
