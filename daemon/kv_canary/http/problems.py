"""Errors as `application/problem+json` (RFC 9457): one shape for every refusal, FastAPI's own 404 and 422 included.

Stateless; runs on the HTTP thread.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from kv_canary.errors import CommandError, SettingsError
from kv_canary.http.models import Problem

if TYPE_CHECKING:
    from fastapi import FastAPI

LOGGER = logging.getLogger("kv_canary.http")
MEDIA_TYPE = "application/problem+json"

TITLES: dict[int, str] = {
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    421: "Misdirected Request",
    422: "Unprocessable Content",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
READ_STATUSES = (413, 421, 500, 503)
WRITE_STATUSES = (400, 401, 403, 408, 409, 413, 415, 421, 422, 500, 503)


class ProblemError(Exception):
    """Raised by a route to answer with a problem. It never leaves the HTTP layer."""

    def __init__(self, status: int, detail: str, **members: Any) -> None:
        self.status, self.detail, self.members = status, detail, members
        super().__init__(detail)


def problem(
    status: int, detail: str, *, title: str | None = None, headers: Mapping[str, str] | None = None, **members: Any
) -> Response:
    """The response. `members` are extra members of the document; a value that JSON cannot carry goes in as its repr."""
    title = title or TITLES.get(status, "Error")
    document = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    document.update({key: _json_safe(value) for key, value in members.items()})
    # ASCII only: what a client sent may hold lone surrogates, which UTF-8 refuses.
    return Response(json.dumps(document).encode("ascii"), status, headers, MEDIA_TYPE)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses=` argument of a route for these error statuses."""
    return {status: {"model": Problem, "description": TITLES[status]} for status in sorted(set(statuses))}


def reads(*more: int) -> dict[int | str, dict[str, Any]]:
    return documented(*READ_STATUSES, *more)


def writes(*more: int) -> dict[int | str, dict[str, Any]]:
    return documented(*WRITE_STATUSES, *more)


def as_problem_media_type(schema: dict[str, Any]) -> dict[str, Any]:
    """FastAPI files the models of error responses under the route's own media type; this puts them under ours."""
    for path in schema.get("paths", {}).values():
        for operation in path.values():
            for status, response in operation.get("responses", {}).items():
                content = response.get("content", {})
                if int(status) >= 400 and MEDIA_TYPE not in content:
                    response["content"] = dict.fromkeys([MEDIA_TYPE], *content.values())
    return schema


def install_problem_handlers(app: FastAPI) -> None:
    """Replaces every answer that FastAPI and Starlette would give on their own."""
    app.add_exception_handler(ProblemError, _on_problem)
    app.add_exception_handler(CommandError, _on_command_error)
    app.add_exception_handler(SettingsError, _on_settings_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return problem(error.status, error.detail, **error.members)


async def _on_command_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CommandError)
    return problem(error.status, str(error), title=error.title)


async def _on_settings_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SettingsError)
    return problem(422, str(error), key=error.key, value=error.value, allowed=error.allowed)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = [{"location": ".".join(map(str, item["loc"])), "message": item["msg"]} for item in error.errors()]
    detail = "; ".join(f"{item['location']}: {item['message']}" for item in errors)
    malformed = any(item["type"] == "json_invalid" for item in error.errors())
    return problem(400, f"the body is not JSON ({detail})") if malformed else problem(422, detail, errors=errors)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        return problem(404, f"there is no {path} here; GET / and GET /openapi.json list what there is")
    if error.status_code == 405:
        allowed = ", ".join(sorted(_methods(request)))
        return problem(405, f"{path} takes {allowed}", headers={"Allow": allowed})
    return problem(error.status_code, str(error.detail), headers=error.headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    return internal_error()


def internal_error() -> Response:
    return problem(500, "a bug in the canary's HTTP layer; the engine is not affected. The log has the traceback.")


def _methods(request: Request) -> set[str]:
    """Methods over all routes of this path: Starlette's own Allow header lists those of the first route only."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return methods | {"HEAD"} if "GET" in methods else methods


def _json_safe(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return repr(value)
    return value
