"""The guard in front of the API: Host, Origin, token, media type, size, headers and the audit log."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from builders.control import FakeControl
from builders.requests import assert_problem, call
from kv_canary.errors import SettingsError
from kv_canary.http.api import CanaryApi, build_app
from kv_canary.http.security import BODY_LIMIT_BYTES, SecurityPolicy, check_token_file
from kv_canary.settings import Settings

TOKEN = "correct-horse-battery-staple"
SWITCH = {"json": {"enabled": False}}
WRITES = (
    ("PUT", "/v1/canary"),
    ("PATCH", "/v1/groups/full"),
    ("PATCH", "/v1/settings"),
    ("POST", "/v1/sweeps"),
    ("POST", "/v1/drills"),
    ("DELETE", "/nothing"),
)


def guarded(control: FakeControl, **settings: Any) -> CanaryApi:
    return build_app(control, settings=Settings(**settings))


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# Host


@pytest.mark.parametrize(
    ("bound", "allowed", "header"),
    [
        ("127.0.0.1", "", "127.0.0.1:10470"),
        ("127.0.0.1", "", "127.8.8.8"),
        ("127.0.0.1", "", "LOCALHOST:9"),
        ("127.0.0.1", "", "localhost."),
        ("127.0.0.1", "", "[::1]:10470"),
        ("127.0.0.1", "", "[::ffff:127.0.0.1]"),
        ("10.0.0.5", "", "10.0.0.5:10470"),
        ("node7.cluster", "", "Node7.cluster:10470"),
        ("127.0.0.1", "canary.example, other.example", "other.example:443"),
        ("127.0.0.1", "*", "anything.example"),
        ("0.0.0.0", "", "10.1.2.3:10470"),
        ("::", "", "[2001:db8::7]:10470"),
        ("0.0.0.0", "", socket.gethostname()),
    ],
)
def test_hosts_that_are_this_server(bound: str, allowed: str, header: str) -> None:
    """Loopback, the bound host, listed names, and on a wildcard bind any address and the machine's own name."""
    assert SecurityPolicy.of(bound, None, allowed).allows_host(header)


@pytest.mark.parametrize(
    ("bound", "allowed", "header"),
    [
        ("127.0.0.1", "", "evil.example"),
        ("127.0.0.1", "", "10.1.2.3"),
        ("127.0.0.1", "", "localhost.evil.example"),
        ("127.0.0.1", "", "127.0.0.1.evil.example"),
        ("127.0.0.1", "", "127.0.0.1@evil.example"),
        ("127.0.0.1", "", "evil.example/127.0.0.1"),
        ("127.0.0.1", "", "127.0.0.1:port"),
        ("127.0.0.1", "", "[::1"),
        ("127.0.0.1", "", "2130706433"),
        ("127.0.0.1", "", ""),
        ("10.0.0.5", "", "10.0.0.6"),
        ("0.0.0.0", "", "evil.example"),
        ("127.0.0.1", "canary.example", "x.canary.example"),
    ],
)
def test_hosts_that_are_not_this_server(bound: str, allowed: str, header: str) -> None:
    """A name that somebody else's DNS points here is not this server's name."""
    assert not SecurityPolicy.of(bound, None, allowed).allows_host(header)


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/status"), ("GET", "/nothing"), ("PUT", "/v1/canary")])
def test_a_foreign_host_is_misdirected(method: str, path: str) -> None:
    """Reads, writes and unknown paths alike; the problem names the host and the setting that would let it in."""
    control = FakeControl()
    options = SWITCH if method == "PUT" else {}
    response = call(guarded(control), method, path, headers={"Host": "evil.example"}, **options)
    document = assert_problem(response, 421, "evil.example", "KV_CANARY_ALLOWED_HOSTS")
    assert document["title"] == "Misdirected Request"
    assert not control.commands


# Origin


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9999", "http://[broken"])
def test_a_page_of_another_origin_cannot_write(origin: str) -> None:
    """A browser tells where a page came from: only this server's own page may write."""
    control = FakeControl()
    response = call(guarded(control), "PUT", "/v1/canary", headers={"Origin": origin}, **SWITCH)
    assert_problem(response, 403, origin)
    assert not control.commands


def test_a_page_of_this_server_can_write() -> None:
    """The status page's own buttons work."""
    control = FakeControl()
    response = call(guarded(control), "PUT", "/v1/canary", headers={"Origin": "http://127.0.0.1:10470"}, **SWITCH)
    assert response.status_code == 200
    assert len(control.commands) == 1


@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
def test_there_are_no_cors_headers(method: str) -> None:
    """No other site may read the answers, whatever it asks for."""
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "PUT"}
    response = call(guarded(FakeControl()), method, "/v1/canary", headers=headers)
    assert not [name for name in response.headers if name.startswith("access-control")]


# Token


def test_a_write_with_the_token_is_carried_out(token_file: Path) -> None:
    """The scheme's name may have any case."""
    control = FakeControl()
    app = guarded(control, token_file=token_file, host="0.0.0.0")
    headers = {"Authorization": f"bearer {TOKEN}"}
    assert call(app, "PUT", "/v1/canary", headers=headers, **SWITCH).status_code == 200
    assert len(control.commands) == 1


@pytest.mark.parametrize(("method", "path"), WRITES)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer("wrong"),
        bearer(TOKEN + "x"),
        bearer(TOKEN[:-1]),
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
    ],
    ids=["none", "empty", "wrong", "longer", "shorter", "no scheme", "basic"],
)
def test_a_write_without_the_right_token_is_unauthorized(
    method: str, path: str, headers: dict[str, str], token_file: Path
) -> None:
    """401 with a challenge, also where there is nothing: who may not write learns nothing of what could be written."""
    control = FakeControl()
    response = call(guarded(control, token_file=token_file), method, path, headers=headers, **SWITCH)
    assert_problem(response, 401, "Authorization")
    assert response.headers["www-authenticate"] == "Bearer"
    assert TOKEN not in response.text
    assert not control.commands


def test_a_token_given_twice_is_unauthorized(token_file: Path) -> None:
    """Which of two headers counts is not for a proxy to decide."""
    headers = [("Authorization", "Bearer wrong"), ("Authorization", f"Bearer {TOKEN}")]
    response = call(guarded(FakeControl(), token_file=token_file), "PUT", "/v1/canary", headers=headers, **SWITCH)
    assert_problem(response, 401)


def test_a_token_of_strange_bytes_is_unauthorized_and_no_error(token_file: Path) -> None:
    """Comparing must not trip over what is not ASCII."""
    headers = {"Authorization": b"Bearer \xff\xe9"}
    response = call(guarded(FakeControl(), token_file=token_file), "PUT", "/v1/canary", headers=headers, **SWITCH)
    assert_problem(response, 401)


@pytest.mark.parametrize("path", ["/v1/status", "/metrics", "/readyz", "/v1/incidents"])
def test_reads_need_no_token(path: str, token_file: Path) -> None:
    """Prometheus and probes have none."""
    assert call(guarded(FakeControl(), token_file=token_file, host="0.0.0.0"), "GET", path).status_code == 200


def test_a_rotated_token_works_at_once(token_file: Path) -> None:
    """The file is read for every write: no restart, and the old token is dead."""
    app = guarded(FakeControl(), token_file=token_file)
    token_file.write_text("second")
    assert call(app, "PUT", "/v1/canary", headers=bearer("second"), **SWITCH).status_code == 200
    assert call(app, "PUT", "/v1/canary", headers=bearer(TOKEN), **SWITCH).status_code == 401


@pytest.mark.parametrize("content", [None, "", " \n", "two words", "na\u00efve", "x" * 5000])
def test_an_unusable_token_file_closes_writes(content: str | None, token_file: Path) -> None:
    """503, whatever token is sent; reads go on."""
    token_file.unlink()
    if content is not None:
        token_file.write_text(content, encoding="utf-8")
    control = FakeControl()
    app = guarded(control, token_file=token_file)
    response = call(
        app,
        "PUT",
        "/v1/canary",
        headers=bearer((content or "").strip() or "x") if content != "na\u00efve" else {},
        **SWITCH,
    )
    assert_problem(response, 503, "token_file")
    assert call(app, "GET", "/v1/status").status_code == 200
    assert not control.commands


@pytest.mark.parametrize("content", [None, "", "\n", "two words"])
def test_a_token_file_is_checked_at_start(content: str | None, tmp_path: Path) -> None:
    """A server that nobody could ever write to is a mistake to tell at once."""
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError, match="token_file"):
        check_token_file(path)


def test_the_token_is_read_without_the_line_end(token_file: Path) -> None:
    """Editors and `echo` add one."""
    assert check_token_file(token_file) == TOKEN


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "node7.cluster"])
def test_an_open_address_without_a_token_serves_reads_only(host: str) -> None:
    """403 that says how to open writes; reads are as ever."""
    control = FakeControl()
    app = guarded(control, host=host)
    assert_problem(call(app, "PUT", "/v1/canary", **SWITCH), 403, "KV_CANARY_TOKEN_FILE", host)
    assert call(app, "GET", "/v1/status").status_code == 200
    assert not control.commands


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "localhost", "::1"])
def test_a_loopback_address_needs_no_token(host: str) -> None:
    """The default: whoever is on the machine may switch."""
    assert call(guarded(FakeControl(), host=host), "PUT", "/v1/canary", **SWITCH).status_code == 200


# Media type and size


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
def test_a_body_of_another_media_type_is_refused(media_type: str) -> None:
    """A form of another site can send these without asking first, so none of them is read."""
    control = FakeControl()
    headers = {"Content-Type": media_type} if media_type else {}
    response = call(guarded(control), "PUT", "/v1/canary", content=b'{"enabled": false}', headers=headers)
    assert_problem(response, 415, "application/json")
    assert not control.commands


def test_json_with_parameters_is_json() -> None:
    """`application/json; charset=utf-8` is what many clients send."""
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    response = call(guarded(FakeControl()), "PUT", "/v1/canary", content=b'{"enabled": false}', headers=headers)
    assert response.status_code == 200


def padded(size: int) -> bytes:
    return b'{"enabled": false}' + b" " * (size - 18)


async def in_chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 4096):
        yield body[start : start + 4096]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_exactly_the_limit_is_taken(chunked: bool) -> None:
    """The limit itself is allowed, however the body is framed."""
    body = padded(BODY_LIMIT_BYTES)
    headers = {"Content-Type": "application/json"}
    content = in_chunks(body) if chunked else body
    assert call(guarded(FakeControl()), "PUT", "/v1/canary", content=content, headers=headers).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [BODY_LIMIT_BYTES + 1, 10 << 20])
def test_a_body_over_the_limit_is_refused(size: int, chunked: bool) -> None:
    """By its announced length, and while it streams in when none is announced."""
    control = FakeControl()
    body, headers = padded(size), {"Content-Type": "application/json"}
    content = in_chunks(body) if chunked else body
    response = call(guarded(control), "PUT", "/v1/canary", content=content, headers=headers)
    assert_problem(response, 413, str(BODY_LIMIT_BYTES))
    assert not control.commands


# Headers and audit


@pytest.mark.parametrize("path", ["/v1/status", "/metrics", "/", "/nothing", "/v1/groups/nothing"])
def test_every_answer_has_the_security_headers(path: str) -> None:
    """Errors too: nothing is sniffed, nothing is cached."""
    response = call(guarded(FakeControl()), "GET", path)
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-store"


def audit_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "kv_canary.audit"]


def test_each_write_leaves_one_audit_line_without_the_token(token_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Method, path, status and client of what was done and of what was refused; never the token."""
    caplog.set_level(logging.INFO, "kv_canary.audit")
    app = guarded(FakeControl(), token_file=token_file)
    call(app, "PUT", "/v1/canary", headers=bearer(TOKEN), **SWITCH)
    call(app, "POST", "/v1/sweeps", headers=bearer("guess"))
    call(app, "GET", "/v1/status")
    assert audit_lines(caplog) == ["PUT /v1/canary 200 from 127.0.0.1", "POST /v1/sweeps 401 from 127.0.0.1"]


def test_a_path_cannot_forge_an_audit_line(caplog: pytest.LogCaptureFixture) -> None:
    """A line end in a path stays an escape."""
    caplog.set_level(logging.INFO, "kv_canary.audit")
    call(guarded(FakeControl()), "DELETE", "/x%0APUT%20/v1/canary%20200")
    assert audit_lines(caplog) == ["DELETE /x%0APUT%20/v1/canary%20200 404 from 127.0.0.1"]
