"""Who may ask: the guard in front of the whole API, routing and streams included. A pure ASGI middleware.

Owns the Host, Origin, token, media type and size checks, the security headers and the audit log. On the HTTP thread.
Reads are open to whoever reaches the port; writes need the token, or a server that is bound to loopback only.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from fastapi import Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kv_canary.errors import SettingsError
from kv_canary.http.hosts import address_of, host_name, is_loopback, is_wildcard, origin_host, own_names
from kv_canary.http.problems import LOGGER, internal_error, problem

AUDIT = logging.getLogger("kv_canary.audit")
BODY_LIMIT_BYTES = 64 << 10
BODY_TIMEOUT_SECONDS = 10.0
TOKEN_LIMIT_BYTES = 4096
READS = frozenset({"GET", "HEAD", "OPTIONS"})
HTML_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityPolicy:
    """What the guard enforces. `host` is the address that the socket was bound to."""

    host: str
    token_file: Path | None
    allowed_hosts: frozenset[str]

    @classmethod
    def of(cls, host: str, token_file: Path | None, allowed_hosts: str) -> SecurityPolicy:
        names = frozenset(name.strip().lower() for name in allowed_hosts.split(",") if name.strip())
        return cls(host=host.strip("[]").lower(), token_file=token_file, allowed_hosts=names)

    @property
    def writes_are_closed(self) -> bool:
        return self.token_file is None and not is_loopback(self.host)

    def allows_host(self, header: str) -> bool:
        """Whether a Host header names this server. Ports are not compared: a forwarded port differs, and is fine."""
        name = host_name(header)
        if name is None:
            return False
        if "*" in self.allowed_hosts or name in self.allowed_hosts or name == self.host or is_loopback(name):
            return True
        if not is_wildcard(self.host):
            return False
        # An address cannot be rebound the way a name can, so a server that is bound to all of them answers to any.
        return address_of(name) is not None or name in own_names()


def check_token_file(path: Path) -> str:
    """The token, read now; `SettingsError` when the file cannot be read or holds no token."""
    try:
        with open(path, "rb") as file:
            raw = file.read(TOKEN_LIMIT_BYTES + 1)
    except OSError as error:
        raise SettingsError("token_file", str(path), f"a file that can be read ({error.strerror})") from error
    try:
        token = raw.decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if not token or len(raw) > TOKEN_LIMIT_BYTES or not token.isprintable() or " " in token:
        raise SettingsError("token_file", str(path), "a file that holds one token of printable ASCII")
    return token


class _RefusedError(Exception):
    """Carries the problem out of the checks."""

    def __init__(self, response: Response) -> None:
        self.response = response
        super().__init__(response.status_code)


def _refused(status: int, detail: str, headers: dict[str, str] | None = None) -> _RefusedError:
    return _RefusedError(problem(status, detail, headers=headers))


class SecurityMiddleware:
    """Outermost layer of the application: nothing behind it sees a request that was refused here."""

    def __init__(self, app: ASGIApp, policy: SecurityPolicy) -> None:
        self.app, self.policy = app, policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = _Outgoing(send, head=scope["method"] == "HEAD")
        headers = Headers(scope=scope)
        is_write = scope["method"] not in READS
        try:
            self._check_host(headers)
            _check_announced_size(headers)
            if is_write:
                await self._check_write(headers)
                receive = await _whole_body(receive)
            elif answer.head:
                scope = {**scope, "method": "GET"}  # same headers as GET; the answer leaves the body out
            await self.app(scope, receive, answer.send)
        except _RefusedError as refused:
            await refused.response(scope, receive, answer.send)
        except Exception:
            LOGGER.exception("kv_canary: HTTP %s %s failed", scope["method"], quote(scope["path"]))
            if answer.status is None:
                await internal_error()(scope, receive, answer.send)
            elif not answer.complete:
                raise  # the server must cut the connection, or the client waits for the rest
        finally:
            if is_write:
                client, *_ = scope.get("client") or ("unknown",)
                AUDIT.info("%s %s %s from %s", scope["method"], quote(scope["path"]), answer.status, client)

    def _check_host(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.policy.allows_host(hosts[0]):
            raise _refused(
                421,
                f"this server does not go by the name {', '.join(hosts) or '(none)'}; to let it, add the name to "
                "KV_CANARY_ALLOWED_HOSTS (comma separated, * for any) and restart",
            )

    async def _check_write(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is not None and origin_host(origin) != headers["host"].lower():
            raise _refused(403, f"a page of another origin ({origin}) may not change anything here")
        if self.policy.writes_are_closed:
            raise _refused(
                403,
                f"bound to {self.policy.host} without a token, this server only answers reads; set "
                "KV_CANARY_TOKEN_FILE to a file that holds a token, or bind to 127.0.0.1",
            )
        if self.policy.token_file is not None:
            await _check_token(self.policy.token_file, headers.getlist("authorization"))
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if has_body and media_type != "application/json":
            raise _refused(415, f"the body must be application/json, not {media_type or 'of no type'}")


async def _check_token(path: Path, authorization: list[str]) -> None:
    """Reads the token at every write, so that a rotated one works at once."""
    try:
        token = await asyncio.to_thread(check_token_file, path)
    except SettingsError as error:
        raise _refused(503, f"writes are closed until the token file is repaired: {error}") from error
    scheme, _, given = (authorization[0] if len(authorization) == 1 else "").partition(" ")
    correct = hmac.compare_digest(given.strip().encode("utf-8", "replace"), token.encode("ascii"))
    if scheme.lower() != "bearer" or not correct:
        detail = (
            f"the bearer token is {'not valid' if authorization else 'missing'}: send Authorization: Bearer <token>"
        )
        raise _refused(401, detail, {"WWW-Authenticate": "Bearer"})


def _check_announced_size(headers: Headers) -> None:
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > BODY_LIMIT_BYTES:
        raise _too_large()


def _too_large() -> _RefusedError:
    return _refused(413, f"a body may have {BODY_LIMIT_BYTES} bytes at most")


async def _whole_body(receive: Receive) -> Receive:
    """Takes in the body, counting it however it is framed, and hands it on as one message."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            while True:
                message = await receive()
                if message["type"] != "http.request":  # gone in the middle: half a body must not be acted upon
                    raise _refused(400, "the connection ended before the body did")
                body += message.get("body", b"")
                if len(body) > BODY_LIMIT_BYTES:
                    raise _too_large()
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise _refused(408, f"the body did not arrive within {BODY_TIMEOUT_SECONDS:g} s") from None
    pending: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


class _Outgoing:
    """Watches what goes out: adds the security headers, and leaves the body out for HEAD."""

    def __init__(self, send: Send, *, head: bool) -> None:
        self._send, self.head = send, head
        self.status: int | None = None
        self.complete = False

    async def send(self, message: Message) -> None:
        if self.complete:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Content-Type-Options"] = "nosniff"
            headers.setdefault("Cache-Control", "no-store")
            if headers.get("content-type", "").startswith("text/html"):
                headers.setdefault("Content-Security-Policy", HTML_POLICY)
        elif self.head or not message.get("more_body", False):
            self.complete = True
            message = {"type": "http.response.body", "body": b"" if self.head else message.get("body", b"")}
        await self._send(message)
