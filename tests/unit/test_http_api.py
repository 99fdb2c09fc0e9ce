"""The control API over the ASGI transport: what it answers, what it submits, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from builders.control import FakeControl
from builders.requests import assert_problem, call
from builders.snapshots import NOW, make_counters, make_drill, make_group, make_incident, make_snapshot, make_sweep
from kv_canary.commands import PatchSettings, RequestDrill, RequestSweep, SetEnabled, SetGroupEnabled
from kv_canary.errors import ConflictError, ForbiddenError
from kv_canary.http.api import CanaryApi, build_app
from kv_canary.http.models import CountersAnswer, GroupAnswer, StatusAnswer, SweepAnswer
from kv_canary.settings import Budget, Settings
from kv_canary.snapshot import GroupCounters, GroupSnapshot, Snapshot, SweepRequest

READ_PATHS = (
    "/v1/status",
    "/v1/canary",
    "/v1/groups",
    "/v1/groups/full",
    "/v1/settings",
    "/v1/sweeps",
    "/v1/incidents",
    "/v1/drills",
    "/v1/targets",
)


class StoppedClock:
    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def time(self) -> float:
        return self.now

    monotonic = time


def make_app(control: FakeControl, **options: Any) -> CanaryApi:
    return build_app(control, **{"settings": Settings(), "clock": StoppedClock()} | options)


def read(control: FakeControl, path: str) -> Any:
    response = call(make_app(control), "GET", path)
    assert response.status_code == 200, response.text
    return response.json()


# Reads


def test_status_is_the_whole_snapshot_as_json() -> None:
    """Everything in one document; totals keyed by a tuple are lists of entries."""
    group = make_group(counters=make_counters(mismatches={("content", "persistent", "real"): 2}))
    control = FakeControl(
        make_snapshot(
            groups=(group,),
            incidents=(make_incident(1), make_incident(2)),
            sweeps=(make_sweep(),),
            drills=(make_drill(),),
            drills_total={("fingerprint", "detected"): 3},
            warnings=("slow",),
        )
    )
    status = read(control, "/v1/status")
    counted = {"check": "content", "persistence": "persistent", "source": "real", "count": 2}
    assert status["groups"][0]["counters"]["mismatches"] == [counted]
    assert status["groups"][0]["sweep"]["eta_seconds"] == 45
    assert status["settings"]["budget"] == "1%"
    assert status["last_incident"]["id"] == "incident-2"
    assert status["sweeps"][0]["progress"] == 0.25
    assert status["drills_total"] == [{"kind": "fingerprint", "result": "detected", "count": 3}]
    assert status["warnings"] == ["slow"]


@pytest.mark.parametrize(
    ("model", "source", "left_out", "added"),
    [
        (StatusAnswer, Snapshot, {"incidents", "tick_monotonic"}, {"last_incident"}),
        (GroupAnswer, GroupSnapshot, set(), set()),
        (CountersAnswer, GroupCounters, {"sweep_duration_buckets", "sweep_duration_sum"}, set()),
        (SweepAnswer, SweepRequest, set(), {"progress"}),
    ],
)
def test_answers_keep_up_with_the_snapshot(model: Any, source: Any, left_out: set[str], added: set[str]) -> None:
    """A field that the snapshot gains reaches the API, or is left out here on purpose."""
    assert set(model.model_fields) == {field.name for field in fields(source)} - left_out | added


def test_a_sidecar_without_a_pool_still_has_a_status() -> None:
    """An unknown pool leaves the sidecar up, without groups and with a reason."""
    control = FakeControl(make_snapshot(state="waiting", reason="no attacher", groups=()))
    status = read(control, "/v1/status")
    assert (status["state"], status["reason"], status["groups"]) == ("waiting", "no attacher", [])
    assert status["last_incident"] is None


def test_single_things_are_found_by_name() -> None:
    """Each list has its items at paths of their own."""
    snapshot = make_snapshot(incidents=(make_incident(1),), sweeps=(make_sweep(),), drills=(make_drill(),))
    control = FakeControl(snapshot)
    assert read(control, "/v1/groups/full") == read(control, "/v1/groups")["groups"][0]
    assert read(control, "/v1/sweeps/sweep-1") == read(control, "/v1/sweeps")["sweeps"][0]
    assert read(control, "/v1/drills/drill-1") == read(control, "/v1/drills")["drills"][0]
    assert read(control, "/v1/incidents/incident-1") == read(control, "/v1/incidents")["incidents"][0]
    assert read(control, "/v1/canary") == {"enabled": True, "state": "running", "reason": None}
    assert read(control, "/v1/settings") == Settings(enabled=True).as_json()


def test_incidents_page_through_with_the_next_cursor() -> None:
    """Following `next` gives every incident once, the newest last, and ends."""
    control = FakeControl(make_snapshot(incidents=tuple(make_incident(n) for n in range(1, 8)), incidents_total=20))
    seen, cursor = [], ""
    while cursor is not None:
        page = read(control, f"/v1/incidents?after={cursor}&limit=3")
        assert page["total"] == 20
        seen += [incident["id"] for incident in page["incidents"]]
        cursor = page["next"]
    assert seen == [f"incident-{n}" for n in range(1, 8)]


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "many", ""])
def test_a_page_size_outside_its_limits_is_refused(limit: str) -> None:
    """limit runs from 1 to 1000."""
    response = call(make_app(FakeControl()), "GET", f"/v1/incidents?limit={limit}")
    assert assert_problem(response, 422, "limit")["errors"][0]["location"] == "query.limit"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/groups/nothing",
        "/v1/incidents/nothing",
        "/v1/incidents?after=nothing",
        "/v1/sweeps/nothing",
        "/v1/drills/nothing",
    ],
)
def test_what_does_not_exist_is_a_404_that_names_it(path: str) -> None:
    """The message names what was asked for, and where the list is."""
    assert_problem(call(make_app(FakeControl()), "GET", path), 404, "nothing")


def test_targets_default_to_this_sidecar() -> None:
    """A single rank needs no list from outside."""
    assert read(FakeControl(), "/v1/targets") == [{"targets": ["127.0.0.1:10470"], "labels": {}}]


def test_targets_come_from_the_given_function() -> None:
    """The http_sd list has the sidecars of all local ranks."""
    ranks = ["127.0.0.1:10470", "127.0.0.1:10471"]
    response = call(make_app(FakeControl(), targets=lambda: ranks), "GET", "/v1/targets")
    assert response.json() == [{"targets": ranks, "labels": {}}]


# Probes and the page


def test_metrics_speak_plain_text_by_default_and_openmetrics_on_request() -> None:
    """One plain route with both formats: no redirect, the right content type."""
    app = make_app(FakeControl())
    plain = call(app, "GET", "/metrics")
    assert (plain.status_code, plain.headers["content-type"].partition(";")[0]) == (200, "text/plain")
    assert 'kv_canary_enabled{group="full"} 1.0' in plain.text
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    modern = call(app, "GET", "/metrics", headers=accept)
    assert modern.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert modern.text.endswith("# EOF\n")


@pytest.mark.parametrize("state", ["waiting", "running", "disabled"])
def test_healthz_is_content_while_the_thread_ticks(state: str) -> None:
    """A switched-off canary is healthy: restarting the server would not help."""
    control = FakeControl(make_snapshot(state=state, tick_at=NOW - 9.9))
    assert read(control, "/healthz") == {"status": "ok", "state": state}


def test_healthz_tells_of_a_thread_that_stopped_ticking() -> None:
    """10 s without a tick is a 503 that says how long it has been."""
    control = FakeControl(make_snapshot(tick_at=NOW - 12))
    assert_problem(call(make_app(control), "GET", "/healthz"), 503, "12.0 s ago")


def test_healthz_tells_of_a_failed_canary() -> None:
    """The reason of the failure is in the answer."""
    control = FakeControl(make_snapshot(state="failed", reason="out of memory"))
    assert_problem(call(make_app(control), "GET", "/healthz"), 503, "out of memory")


def test_readyz_is_content_when_running_with_a_group() -> None:
    """Ready means that something is guarded."""
    assert read(FakeControl(), "/readyz") == {"status": "ok", "state": "running"}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"state": "waiting"}, "waiting"),
        ({"groups": ()}, "no canary group"),
        ({"state": "failed", "reason": "why"}, "why"),
    ],
)
def test_readyz_says_why_it_is_not_ready(changes: dict[str, Any], word: str) -> None:
    """503 with the reason until a group is attached and the canary runs."""
    assert_problem(call(make_app(FakeControl(make_snapshot(**changes))), "GET", "/readyz"), 503, word)


@pytest.mark.parametrize(
    ("query", "expected"), [("&limit=3", [5, 6, 7]), ("&limit=3&after=incident-6", [7]), ("", range(1, 8))]
)
def test_the_newest_incidents_are_had_without_paging_through_all(query: str, expected: list[int]) -> None:
    """What a person looks at first; still the newest last."""
    control = FakeControl(make_snapshot(incidents=tuple(make_incident(n) for n in range(1, 8))))
    page = read(control, f"/v1/incidents?newest=true{query}")
    assert [incident["id"] for incident in page["incidents"]] == [f"incident-{n}" for n in expected]
    assert page["next"] is None


# Writes


def test_the_master_switch_is_a_command() -> None:
    """PUT /v1/canary submits one command and answers with the state after it."""
    control = FakeControl()
    response = call(make_app(control), "PUT", "/v1/canary", json={"enabled": False})
    assert response.json() == {"enabled": False, "state": "disabled", "reason": None}
    assert control.commands == [SetEnabled(enabled=False)]


def test_a_group_switch_is_a_command() -> None:
    """PATCH /v1/groups/{group} answers with that group after the command."""
    control = FakeControl(make_snapshot(groups=(make_group("full"), make_group("swa"))))
    response = call(make_app(control), "PATCH", "/v1/groups/swa", json={"enabled": False})
    assert (response.json()["name"], response.json()["enabled"]) == ("swa", False)
    assert control.commands == [SetGroupEnabled(group="swa", enabled=False)]


def test_live_settings_change_by_a_command() -> None:
    """PATCH /v1/settings hands the object on as it is and answers with all settings."""
    control = FakeControl()
    response = call(make_app(control), "PATCH", "/v1/settings", json={"budget": "2GB/s", "sweep_deadline": 30})
    assert (response.json()["budget"], response.json()["sweep_deadline"]) == ("2GB/s", 30)
    assert control.commands == [PatchSettings(changes={"budget": "2GB/s", "sweep_deadline": 30})]
    assert control.current.settings.budget == Budget(bytes_per_second=2e9)


@pytest.mark.parametrize("body", [None, {}, {"group": None}, {"group": "full"}])
def test_a_sweep_is_accepted_with_its_location(body: dict[str, Any] | None) -> None:
    """202, a Location that exists, and no body needed to sweep everything."""
    control = FakeControl()
    app = make_app(control)
    response = call(app, "POST", "/v1/sweeps", **({} if body is None else {"json": body}))
    assert response.status_code == 202
    assert control.commands == [RequestSweep(group=(body or {}).get("group"))]
    assert call(app, "GET", response.headers["location"]).json() == response.json()


def test_a_drill_is_accepted_with_its_location() -> None:
    """202 and a Location that exists."""
    control = FakeControl()
    app = make_app(control)
    response = call(app, "POST", "/v1/drills", json={"kind": "fingerprint", "alert": True})
    assert response.status_code == 202
    assert control.commands == [RequestDrill(kind="fingerprint", group=None, alert=True)]
    assert call(app, "GET", response.headers["location"]).json() == response.json()


@pytest.mark.parametrize(
    ("method", "path", "body", "named"),
    [
        ("PUT", "/v1/canary", {"enabled": True, "force": 1}, "body.force"),
        ("PUT", "/v1/canary", {}, "body.enabled"),
        ("PUT", "/v1/canary", {"enabled": "yes"}, "body.enabled"),
        ("PUT", "/v1/canary", {"enabled": 1}, "body.enabled"),
        ("PUT", "/v1/canary", [True], "body"),
        ("PUT", "/v1/canary", None, "body"),
        ("PATCH", "/v1/groups/full", {"enabled": True, "kind": "swa"}, "body.kind"),
        ("PATCH", "/v1/settings", ["budget"], "body"),
        ("PATCH", "/v1/settings", None, "body"),
        ("POST", "/v1/sweeps", {"pages": 3}, "body.pages"),
        ("POST", "/v1/sweeps", {"group": 3}, "body.group"),
        ("POST", "/v1/drills", {}, "body.kind"),
        ("POST", "/v1/drills", {"kind": "arson"}, "body.kind"),
        ("POST", "/v1/drills", {"kind": "fingerprint", "page": 3}, "body.page"),
    ],
)
def test_a_body_of_the_wrong_shape_is_refused_by_name(method: str, path: str, body: Any, named: str) -> None:
    """422 says which key is wrong, and nothing is submitted."""
    control = FakeControl()
    response = call(
        make_app(control), method, path, content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    locations = [error["location"] for error in assert_problem(response, 422, named)["errors"]]
    assert named in locations
    assert not control.commands


@pytest.mark.parametrize(
    "body", [b"{", b"enabled=false", b"\xff\xfe", b"[" * 60_000, b'{"enabled": ' + b"9" * 5000 + b"}"]
)
def test_a_body_that_is_not_json_is_a_400(body: bytes) -> None:
    """Broken syntax, broken UTF-8, absurd depth and absurd numbers are the client's error, not ours."""
    control = FakeControl()
    response = call(make_app(control), "PUT", "/v1/canary", content=body, headers={"Content-Type": "application/json"})
    assert_problem(response, 400)
    assert not control.commands


def test_an_empty_settings_object_is_refused_with_what_can_change() -> None:
    """A PATCH that changes nothing is a mistake worth telling."""
    control = FakeControl()
    assert_problem(call(make_app(control), "PATCH", "/v1/settings", json={}), 422, "budget", "drill_interval")
    assert not control.commands


@pytest.mark.parametrize(
    ("key", "sent", "shown"),
    [
        ("budget", '"fast"', "fast"),
        ("sweep_deadline", "NaN", "nan"),
        ("sweep_deadline", "1e999", "inf"),
        ("port", "1", 1),
        ("budget", '"\\ud800"', "\ud800"),
    ],
)
def test_a_refused_setting_names_key_value_and_what_is_allowed(key: str, sent: str, shown: object) -> None:
    """The members let a program say what a person would read; a value that JSON cannot carry is spelled out."""
    body = f'{{"{key}": {sent}}}'
    response = call(
        make_app(FakeControl()), "PATCH", "/v1/settings", content=body, headers={"Content-Type": "application/json"}
    )
    document = assert_problem(response, 422, key)
    assert (document["key"], document["value"]) == (key, shown)
    assert document["allowed"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PATCH", "/v1/groups/nothing", {"enabled": True}),
        ("POST", "/v1/sweeps", {"group": "nothing"}),
        ("POST", "/v1/drills", {"kind": "fingerprint", "group": "nothing"}),
        ("POST", "/v1/drills", {"kind": "fingerprint", "group": "nothing \ud800"}),
    ],
)
def test_a_write_to_an_unknown_group_is_a_404_and_submits_nothing(method: str, path: str, body: Any) -> None:
    """The snapshot knows the groups, so the canary thread need not be asked."""
    control = FakeControl()
    headers = {"Content-Type": "application/json"}
    response = call(make_app(control), method, path, content=json.dumps(body), headers=headers)
    assert_problem(response, 404, "nothing", "full")
    assert not control.commands


@pytest.mark.parametrize(("error", "status"), [(ConflictError("busy"), 409), (ForbiddenError("switched off"), 403)])
def test_a_refused_command_has_its_own_status(error: Exception, status: int) -> None:
    """What the canary thread refuses comes back with the status of that refusal."""

    def refuse(command: object) -> None:
        raise error

    control = FakeControl(answer=refuse)
    response = call(make_app(control), "POST", "/v1/drills", json={"kind": "content"})
    assert assert_problem(response, status, str(error))["title"] == type(error).title


def test_a_silent_canary_thread_is_a_503_that_names_the_command() -> None:
    """A write never waits for ever, and the message says that it may still take effect."""
    control = FakeControl(silent=True)
    app = make_app(control, command_timeout_seconds=0.01)
    response = call(app, "PUT", "/v1/canary", json={"enabled": False})
    assert assert_problem(response, 503, "SetEnabled", "may still")["command"] == "SetEnabled"
    assert not control.futures[0].cancelled()


def test_a_command_withdrawn_by_the_canary_is_a_503() -> None:
    """A canary that stops cancels what is queued."""
    control = FakeControl(silent=True)

    class Stopping(FakeControl):
        def submit(self, command: Any) -> Any:
            future = control.submit(command)
            future.cancel()
            return future

    assert_problem(call(make_app(Stopping()), "PUT", "/v1/canary", json={"enabled": False}), 503, "withdrawn")


def test_a_bug_is_a_500_problem_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """The client learns nothing of the code; the log has it all, once."""

    def broken(command: object) -> None:
        raise RuntimeError("secret detail")

    response = call(make_app(FakeControl(answer=broken)), "PUT", "/v1/canary", json={"enabled": False})
    assert_problem(response, 500)
    assert "secret detail" not in response.text
    assert response.headers["x-content-type-options"] == "nosniff"
    assert [record.name for record in caplog.records if record.exc_info] == ["kv_canary.http"]


# Routing and documentation


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/status/", "/docs", "/redoc", "/metrics/", "/v1/groups/a/b"])
def test_an_unknown_path_is_a_404_problem(path: str) -> None:
    """Also a trailing slash: no redirects; and there are no documentation pages that load scripts from elsewhere."""
    assert_problem(call(make_app(FakeControl()), "GET", path), 404, path)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/v1/canary", "GET, HEAD, PUT"),
        ("POST", "/v1/status", "GET, HEAD"),
        ("PUT", "/v1/groups/full", "GET, HEAD, PATCH"),
        ("OPTIONS", "/v1/sweeps", "GET, HEAD, POST"),
        ("TRACE", "/metrics", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_a_405_with_the_right_ones(method: str, path: str, allowed: str) -> None:
    """Allow lists the methods of all routes of the path."""
    control = FakeControl()
    response = call(make_app(control), method, path)
    assert_problem(response, 405, path)
    assert response.headers["allow"] == allowed
    assert not control.commands


@pytest.mark.parametrize("path", [*READ_PATHS, "/metrics", "/healthz", "/readyz", "/", "/v1/incidents/stream"])
def test_head_answers_like_get_without_a_body(path: str) -> None:
    """Load balancers probe with HEAD; on a stream it must not hang."""
    response = call(make_app(FakeControl()), "HEAD", path)
    assert (response.status_code, response.content) == (200, b"")


def test_the_documentation_knows_every_status_and_media_type_of_the_errors() -> None:
    """A fuzzer that goes by /openapi.json meets nothing undocumented."""
    schema = call(make_app(FakeControl()), "GET", "/openapi.json").json()
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            statuses = set(operation["responses"])
            writes = {"400", "401", "403", "408", "409", "413", "415", "421", "422", "500", "503"}
            assert (writes if method != "get" else {"413", "421", "500", "503"}) <= statuses, (method, path)
            assert not operation.get("parameters") or "422" in statuses, (method, path)
            assert "{" not in path or "404" in statuses, (method, path)
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    assert list(response["content"]) == ["application/problem+json"], (method, path, status)
                    reference = response["content"]["application/problem+json"]["schema"]["$ref"]
                    assert reference == "#/components/schemas/Problem"


@pytest.mark.parametrize("path", READ_PATHS)
def test_answers_have_the_documented_fields(path: str) -> None:
    """The schema of each read is the model that it answers with."""
    app = make_app(FakeControl())
    schema = app.openapi()
    pattern = path.replace("/full", "/{group}")
    documented = schema["paths"][pattern]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    answer = call(app, "GET", path).json()
    if "$ref" in documented:
        model = schema["components"]["schemas"][documented["$ref"].rpartition("/")[2]]
        assert set(answer) == set(model["properties"])


def test_the_package_imports_without_the_web_framework() -> None:
    """Only kv_canary.http needs fastapi, uvicorn and pydantic."""
    code = "import sys, kv_canary; print([name for name in ('fastapi', 'uvicorn', 'pydantic') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
