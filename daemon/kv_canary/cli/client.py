"""The command line's HTTP client: JSON in, JSON out, every failure one clear error.

Owns the connection, the token and the translation of failures. Built on `http.client`, because the control API is on
loopback: no proxy variables, no redirects that would carry the token elsewhere, and nothing more to install.
"""

from __future__ import annotations

import http.client
import json
import socket
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from kv_canary._version import __version__
from kv_canary.errors import (
    CommandError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    SettingsError,
    UnreachableError,
)
from kv_canary.settings import DEFAULT_PORT

Document = dict[str, Any]

DEFAULT_TIMEOUT_SECONDS = 10.0
BODY_LIMIT_BYTES = 64 << 20  # far above any real answer; a wrong server must not fill the memory

_REFUSALS: dict[int, type[CommandError]] = {404: NotFoundError, 409: ConflictError, 403: ForbiddenError}


class Client:
    """Talks to the control API of one sidecar.

    Raises `UnreachableError` when no KV Canary answers, `CommandError` (or a subclass) when it refuses, and
    `SettingsError` for a URL or a token file that cannot be used. The token file is read for writes only, so that
    somebody who may not read it can still look.
    """

    def __init__(
        self, url: str, *, token_file: Path | None = None, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    ) -> None:
        self._secure, self._host, self._port, self._prefix = _parse_url(url)
        scheme = "https" if self._secure else "http"
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"{scheme}://{host}:{self._port}{self._prefix}"
        self.timeout_seconds = timeout_seconds
        self._token_file = token_file
        self.server_time: float | None = None
        """Seconds since 1970 by the server's clock at its last answer; None when it did not say."""

    def get(self, path: str, query: dict[str, str | int] | None = None) -> Document:
        return self._request("GET", path + ("?" + urlencode(query) if query else ""), None)

    def put(self, path: str, body: Document) -> Document:
        return self._request("PUT", path, body)

    def patch(self, path: str, body: Document) -> Document:
        return self._request("PATCH", path, body)

    def post(self, path: str, body: Document) -> Document:
        return self._request("POST", path, body)

    def _request(self, method: str, path: str, body: Document | None) -> Document:
        headers = {
            "Accept": "application/json, application/problem+json",
            "User-Agent": f"kv-canary/{__version__}",
            "Connection": "close",
        }
        token = None
        if method != "GET":
            headers["Content-Type"] = "application/json"
            token = self._token()
            if token is not None:
                headers["Authorization"] = f"Bearer {token}"
        connect = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = connect(self._host, self._port, timeout=self.timeout_seconds)
        try:
            connection.request(method, self._prefix + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read(BODY_LIMIT_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()
        self.server_time = _date(response.headers.get("Date"))
        content_type = response.headers.get_content_type()
        document = _json_object(text)
        if 200 <= response.status < 300 and document is not None:
            return document
        if response.status >= 400 and content_type == "application/problem+json" and document is not None:
            raise self._refused(response.status, document, token_sent=token is not None)
        raise UnreachableError(
            f"something answers at {self.url}, but not KV Canary (HTTP {response.status}, {content_type})\n"
            f"the canary has a port of its own, {DEFAULT_PORT} + local rank by default: give it with --url"
        )

    def _token(self) -> str | None:
        """The bearer token; never part of a message."""
        if self._token_file is None:
            return None
        try:
            token = self._token_file.read_text(encoding="ascii").strip()
        except OSError as error:
            raise SettingsError(
                "--token-file", str(self._token_file), f"a file that can be read ({error.strerror})"
            ) from error
        except UnicodeDecodeError:
            token = ""
        if not token or not token.isprintable() or " " in token:
            raise SettingsError("--token-file", str(self._token_file), "a file that holds one token of printable ASCII")
        return token

    def _unreachable(self, error: Exception) -> UnreachableError:
        if isinstance(error, ConnectionRefusedError):
            return UnreachableError(
                f"nobody listens at {self.url} (connection refused)\n"
                f"check that the server runs with KV_CANARY=on; its log names the port for --url "
                f"({DEFAULT_PORT} + local rank, or the next free one)"
            )
        if isinstance(error, TimeoutError):
            return UnreachableError(
                f"no answer from {self.url} within {self.timeout_seconds:g} s\n"
                "check that the server's process is alive and not stopped; --timeout waits longer"
            )
        if isinstance(error, socket.gaierror):
            return UnreachableError(
                f"host name {self._host!r} of {self.url} is not known\ncheck --url or KV_CANARY_HOST"
            )
        if isinstance(error, http.client.HTTPException) and not isinstance(error, OSError):
            return UnreachableError(f"what listens at {self.url} does not speak HTTP\ncheck the port in --url")
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return UnreachableError(f"cannot talk to {self.url}: {reason}\ncheck --url and the server's log")

    def _refused(self, status: int, problem: Document, *, token_sent: bool) -> CommandError:
        title = str(problem.get("title") or "Refused")
        detail = str(problem.get("detail") or "")
        message = f"{title}: {detail}" if detail else f"{title} (HTTP {status})"
        if status == 401 and token_sent:
            message += f"\nthe token in {self._token_file} is not the one in the server's own token file"
        elif status == 401:
            message += "\nthis server wants a token for changes: give --token-file FILE or set KV_CANARY_TOKEN_FILE"
        error = _REFUSALS.get(status, CommandError)(message)
        error.status = status
        return error


def _parse_url(url: str) -> tuple[bool, str, int, str]:
    """Whether TLS is used, host, port and path prefix."""
    allowed = f"an address such as http://127.0.0.1:{DEFAULT_PORT}"
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise SettingsError("--url", url, f"{allowed} ({error})") from error
    host = parts.hostname or ""
    sendable = (host + parts.path).isascii() and (host + parts.path).isprintable() and " " not in host + parts.path
    if parts.scheme not in ("http", "https") or not host or not sendable:
        raise SettingsError("--url", url, allowed)
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    return parts.scheme == "https", host, port, parts.path.rstrip("/")


def _json_object(text: bytes) -> Document | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _date(header: str | None) -> float | None:
    try:
        return parsedate_to_datetime(header).timestamp() if header else None
    except ValueError:
        return None
