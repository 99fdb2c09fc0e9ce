"""One request to the application without a socket: the httpx client over the ASGI transport."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from kv_canary.http.api import CanaryApi

BASE_URL = "http://127.0.0.1:10470"
PROBLEM = "application/problem+json"


def call(app: CanaryApi, method: str, path: str, *, base_url: str = BASE_URL, **options: Any) -> httpx.Response:
    """What the application answers. Errors inside it come back as responses, as they would from a real server."""

    async def exchange() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=base_url) as client:
            return await client.request(method, path, **options)

    return asyncio.run(exchange())


def assert_problem(response: httpx.Response, status: int, *words: str) -> dict[str, Any]:
    """A problem document of this status whose detail has all of these words; returns the document."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == PROBLEM
    document: dict[str, Any] = response.json()
    assert document["status"] == status
    assert document["type"] == "about:blank"
    assert document["title"]
    for word in words:
        assert word in document["detail"]
    return document
