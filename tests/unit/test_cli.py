"""The `kv-canary` command against a fake control API on a real socket: what people and programs get, exit statuses."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from builders.fake_api import (
    NOW,
    FakeApi,
    drill_document,
    finished_sweep,
    group_document,
    incident_document,
    mismatches,
    problem,
    settings_document,
    status_document,
    sweep_document,
)
from kv_canary import __version__
from kv_canary.cli import demo as demo_module
from kv_canary.cli import main, render
from kv_canary.cli.program import run
from kv_canary.cli.session import Surroundings
from kv_canary.cli.verdict import judge
from kv_canary.cli.watch import read_rates
from kv_canary.http.models import CountersAnswer, GroupAnswer, StatusAnswer, SweepAnswer
from kv_canary.snapshot import Drill, Incident, SweepRequest


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@dataclass
class TickingClock:
    """Time that passes only when somebody waits; `interrupt_after` waits, Ctrl-C comes."""

    seconds: float = 0.0
    waits: int = 0
    interrupt_after: int | None = None

    def time(self) -> float:
        return NOW + self.seconds

    def monotonic(self) -> float:
        return self.seconds

    def wait(self, seconds: float) -> None:
        self.seconds += seconds
        self.waits += 1
        if self.interrupt_after is not None and self.waits >= self.interrupt_after:
            raise KeyboardInterrupt


@dataclass
class Invocation:
    """Runs the command in surroundings that a test looks into afterwards."""

    url: str
    environment: dict[str, str] = field(default_factory=dict)
    clock: TickingClock = field(default_factory=TickingClock)
    stdout: io.StringIO = field(default_factory=io.StringIO)
    stderr: io.StringIO = field(default_factory=io.StringIO)

    def __call__(self, *argv: str) -> int:
        surroundings = Surroundings(
            stdout=self.stdout,
            stderr=self.stderr,
            environment=self.environment,
            clock=self.clock,
            wait=self.clock.wait,
        )
        return run([*argv, "--url", self.url], surroundings)

    @property
    def out(self) -> str:
        return self.stdout.getvalue()

    @property
    def err(self) -> str:
        return self.stderr.getvalue()

    @property
    def document(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def api() -> Iterator[FakeApi]:
    """A server on which nothing is wrong and everything that is asked works."""
    routes: dict[tuple[str, str], Any] = {
        ("GET", "/v1/status"): status_document(),
        ("GET", "/v1/groups"): {"groups": [group_document()]},
        ("PUT", "/v1/canary"): {"enabled": True, "state": "running", "reason": None},
        ("PATCH", "/v1/groups/full"): group_document(),
        ("POST", "/v1/sweeps"): (202, sweep_document()),
        ("GET", "/v1/sweeps/s-1"): [sweep_document(), finished_sweep()],
        ("GET", "/v1/incidents"): {"incidents": [], "next": None, "total": 0},
        ("GET", "/v1/incidents/i-1"): incident_document(),
        ("POST", "/v1/drills"): (202, drill_document()),
        ("GET", "/v1/drills/d-1"): [drill_document(), drill_document(result="detected", seconds=0.03)],
        ("GET", "/v1/settings"): settings_document(),
        ("PATCH", "/v1/settings"): settings_document(budget="2%"),
    }
    with FakeApi(routes) as fake:
        yield fake


@pytest.fixture
def cli(api: FakeApi) -> Invocation:
    return Invocation(api.url)


COMMANDS: dict[str, tuple[str, ...]] = {
    "status": ("No mismatch; 1 of 1 group on", "50%", "automatic fingerprint drill d-7", "up 3 h 12 min"),
    "groups": ("full  on", "1,204 sealed", "48 buffers"),
    "enable": ("The canary is on",),
    "enable full": ("Group full is on",),
    "disable": ("The canary is off", "kv-canary enable"),
    "disable full": ("Group full is off", "kv-canary enable full"),
    "sweep": ("301 of 1,204 pages", "kv-canary watch"),
    "sweep --group full --wait": ("finished in 3.4 s", "1,190 of 1,204 pages verified", "0 mismatches"),
    "incidents": ("No incidents.",),
    "drill fingerprint": ("running", "kv-canary status"),
    "drill content --group full --alert --wait": ("detected in 30 ms",),
    "settings": ("sweep_deadline", "live", "restart"),
    "settings budget=2%": ("2%",),
}


@pytest.mark.parametrize(("command", "expected"), COMMANDS.items())
def test_each_command_tells_a_person_what_happened(cli: Invocation, command: str, expected: tuple[str, ...]) -> None:
    """On a clean server every command exits 0, says what it did on at most 100 plain columns, and nothing on stderr."""
    assert cli(*command.split()) == 0
    assert all(text in cli.out for text in expected), cli.out
    assert cli.err == ""
    assert max(len(line) for line in cli.out.splitlines()) <= 100
    assert "\x1b" not in cli.out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_gives_programs_the_document_of_the_api(api: FakeApi, cli: Invocation, command: str) -> None:
    """With `--json`, stdout is exactly the API's last answer, wherever the option stands."""
    assert cli("--json", *command.split()) == 0
    answers = [answer[1] if isinstance(answer, tuple) else answer for answer in api.routes.values()]
    assert cli.document in [one for answer in answers for one in (answer if isinstance(answer, list) else [answer])]


@pytest.mark.parametrize(
    ("command", "request_made"),
    [
        ("enable", ("PUT", "/v1/canary", {"enabled": True})),
        ("disable", ("PUT", "/v1/canary", {"enabled": False})),
        ("disable full", ("PATCH", "/v1/groups/full", {"enabled": False})),
        ("disable a/b", ("PATCH", "/v1/groups/a%2Fb", {"enabled": False})),
        ("sweep", ("POST", "/v1/sweeps", {"group": None})),
        ("sweep --group full", ("POST", "/v1/sweeps", {"group": "full"})),
        ("incidents --after i-3 --limit 5", ("GET", "/v1/incidents?limit=5&after=i-3", None)),
        ("drill content --alert", ("POST", "/v1/drills", {"kind": "content", "group": None, "alert": True})),
        (
            "settings budget=2GB/s sweep_deadline=30 drill_interval=0.5 on_mismatch=log",
            (
                "PATCH",
                "/v1/settings",
                {"budget": "2GB/s", "sweep_deadline": 30, "drill_interval": 0.5, "on_mismatch": "log"},
            ),
        ),
    ],
)
def test_each_command_asks_for_what_it_says(api: FakeApi, cli: Invocation, command: str, request_made: Any) -> None:
    """Arguments become the method, path and body of the API."""
    cli(*command.split())
    assert api.requests[0] == request_made


def test_the_fakes_documents_are_those_of_the_api() -> None:
    """The canned documents have exactly the members, with the types, that the real API answers with."""
    group = group_document()
    assert set(status_document()) == set(StatusAnswer.model_fields)
    assert set(group) == set(GroupAnswer.model_fields)
    assert set(group["counters"]) == set(CountersAnswer.model_fields)
    assert set(sweep_document()) == {*SweepRequest.__dataclass_fields__, "progress"} >= set(SweepAnswer.model_fields)
    StatusAnswer.model_validate(status_document(last_incident=incident_document(), sweeps=[sweep_document()]))
    TypeAdapter(Incident).validate_python(incident_document())
    TypeAdapter(Drill).validate_python(drill_document())
    assert set(incident_document()) == set(Incident.__dataclass_fields__)
    assert set(drill_document()) == set(Drill.__dataclass_fields__)


# --- what is wrong, and what to do first


def test_a_real_mismatch_leads_the_status_screen_and_exits_1(api: FakeApi, cli: Invocation) -> None:
    """A real mismatch in the counters is the headline, names the next command, and is exit status 1."""
    api.routes["GET", "/v1/status"] = status_document(groups=[group_document(counters={"mismatches": mismatches(2)})])
    assert cli("status") == 1
    lines = cli.out.splitlines()
    assert lines[1].startswith("MISMATCH")
    assert "2 real mismatches" in lines[2]
    assert lines[3].strip() == "first: kv-canary incidents"


def test_a_real_last_incident_alone_exits_1(api: FakeApi, cli: Invocation) -> None:
    """An incident with source real is enough for exit status 1."""
    api.routes["GET", "/v1/status"] = status_document(last_incident=incident_document())
    assert cli("status", "--json") == 1


def test_mismatches_of_drills_are_clean(api: FakeApi, cli: Invocation) -> None:
    """A rehearsed alert is no mismatch."""
    api.routes["GET", "/v1/status"] = status_document(
        groups=[group_document(counters={"mismatches": mismatches(3, source="drill")})],
        last_incident=incident_document(source="drill", drill="d-3"),
    )
    assert cli("status") == 0
    assert "CLEAN" in cli.out


@pytest.mark.parametrize(
    ("changes", "word", "what"),
    [
        ({"enabled": False, "state": "disabled"}, "OFF", "switched off"),
        ({"state": "waiting", "groups": [], "reason": "no attacher for foo.Bar"}, "WAITING", "no attacher for foo.Bar"),
        ({"state": "failed", "reason": "out of memory"}, "FAILED", "has failed: out of memory"),
        ({"state": "stopped"}, "STOPPED", "has stopped"),
        ({"tick_at": NOW - 300}, "ATTENTION", "has not ticked for 5 min"),
        (
            {"groups": [group_document(enabled=False, disabled_reason="RuntimeError")]},
            "OFF",
            "full is off: RuntimeError",
        ),
        ({"groups": [group_document(), group_document("swa", enabled=False)]}, "ATTENTION", "group swa is off"),
        (
            {"groups": [group_document(sweep={**group_document()["sweep"], "deadline_met": False})]},
            "ATTENTION",
            "takes longer than sweep_deadline (1 min)",
        ),
        (
            {"drills_total": [{"kind": "content", "result": "missed", "count": 1}]},
            "ATTENTION",
            "1 content drill missed",
        ),
        ({"errors": {"scrubber": 2}, "last_errors": ["first", "last one"]}, "ATTENTION", "scrubber 2; last: last one"),
        ({"warnings": ["two pools share memory"]}, "ATTENTION", "two pools share memory"),
        ({"settings": settings_document(budget="off")}, "ATTENTION", "budget is off"),
    ],
)
def test_every_trouble_is_named(changes: dict[str, Any], word: str, what: str) -> None:
    """Each way of not guarding has a headline that is not CLEAN and a finding that says what it is."""
    verdict = judge(status_document(**changes), NOW)
    assert verdict.word == word
    assert what in " | ".join(finding.what for finding in verdict.findings)


def test_text_from_the_server_cannot_steer_the_terminal(api: FakeApi, cli: Invocation) -> None:
    """Escape sequences in names and reasons do not reach the terminal."""
    api.routes["GET", "/v1/status"] = status_document(
        engine="\x1b[2J", warnings=["\x1b]0;owned\x07"], groups=[group_document("\x1b[31m")]
    )
    cli("status")
    assert "\x1b" not in cli.out
    assert "\x07" not in cli.out


def test_ages_are_told_by_the_servers_clock(api: FakeApi, cli: Invocation) -> None:
    """A wrong clock on this machine changes nothing: a live server is not called hung."""
    cli.clock.seconds = 1e6
    cli("status")
    assert "CLEAN" in cli.out


def test_colour_is_for_terminals_that_want_it(api: FakeApi) -> None:
    """Colour on a terminal, none with NO_COLOR."""
    coloured = Invocation(api.url, stdout=Terminal())
    coloured("status")
    refused = Invocation(api.url, stdout=Terminal(), environment={"NO_COLOR": "1"})
    refused("status")
    assert "\x1b[32mCLEAN\x1b[0m" in coloured.out
    assert "\x1b" not in refused.out


# --- incidents


def test_real_incidents_exit_1_and_the_newest_comes_first_to_hand(api: FakeApi, cli: Invocation) -> None:
    """The list shows each incident and points at the newest real one."""
    found = [incident_document("i-1"), incident_document("i-2"), incident_document("i-3", source="drill")]
    api.routes["GET", "/v1/incidents"] = {"incidents": found, "next": None, "total": 9}
    assert cli("incidents") == 1
    assert "first: kv-canary incidents i-2" in cli.out
    assert "6 older ones are no longer kept" in cli.out


def test_a_real_incident_on_the_last_page_is_not_missed(api: FakeApi, cli: Invocation) -> None:
    """Without a limit all pages are read; the document holds them all."""
    drilled = incident_document("i-1", source="drill")
    api.routes["GET", "/v1/incidents"] = [
        {"incidents": [drilled], "next": "i-1", "total": 2},
        {"incidents": [incident_document("i-2")], "next": None, "total": 2},
    ]
    assert cli("incidents", "--json") == 1
    assert [incident["id"] for incident in cli.document["incidents"]] == ["i-1", "i-2"]
    assert api.requests[1][1] == "/v1/incidents?limit=1000&after=i-1"


def test_with_a_limit_the_way_to_the_next_page_is_shown(api: FakeApi, cli: Invocation) -> None:
    """A limit gives one page and the command for the following one."""
    api.routes["GET", "/v1/incidents"] = {"incidents": [incident_document()], "next": "i-1", "total": 2}
    cli("incidents", "--limit", "1")
    assert "more:  kv-canary incidents --after i-1" in cli.out
    assert len(api.requests) == 1


def test_one_incident_is_shown_in_full(cli: Invocation) -> None:
    """Cause, window, owners, layers and fingerprints are all there; a real one exits 1."""
    assert cli("incidents", "i-1") == 1
    for text in ("misdirected copy", "a window of 33 s", "req-118", "req-90", "layers 1-2", "9c01aa7754d1e0f2"):
        assert text in cli.out


def test_pages_that_went_bad_together_are_listed(api: FakeApi, cli: Invocation) -> None:
    """How many more in the list; which ones in full, as far as they are listed."""
    document = incident_document(page=7, neighbours=[8, 9, 12], pages_total=300)
    api.routes["GET", "/v1/incidents/i-1"] = document
    api.routes["GET", "/v1/incidents"] = {"incidents": [document], "next": None, "total": 1}
    cli("incidents", "i-1")
    assert "8-9, 12, ... (300 pages in all)" in cli.out
    cli("incidents")
    assert "7 +299" in cli.out


# --- sweeps and drills


def test_a_sweep_that_finds_something_exits_1(api: FakeApi, cli: Invocation) -> None:
    """`sweep --wait` turns a found mismatch into exit status 1."""
    api.routes["GET", "/v1/sweeps/s-1"] = finished_sweep(mismatches=1)
    assert cli("sweep", "--wait") == 1
    assert "1 mismatch." in cli.out
    assert "first: kv-canary incidents" in cli.out


def test_a_clean_sweep_over_a_group_that_was_wrong_exits_1(api: FakeApi, cli: Invocation) -> None:
    """An earlier real mismatch in the swept group is not whitewashed by a pass that finds nothing new."""
    api.routes["GET", "/v1/groups"] = {"groups": [group_document(counters={"mismatches": mismatches(1)})]}
    assert cli("sweep", "--wait") == 1


def test_an_interrupted_sweep_is_not_clean(api: FakeApi, cli: Invocation) -> None:
    """A sweep that did not get to the end exits 2."""
    api.routes["GET", "/v1/sweeps/s-1"] = sweep_document(state="interrupted", finished_at=NOW)
    assert cli("sweep", "--wait") == 2
    assert "proves nothing" in cli.out


def test_waiting_shows_a_bar_to_a_person_only(api: FakeApi) -> None:
    """The bar is drawn on stderr when that is a terminal, and removed at the end."""
    seen = Invocation(api.url, stderr=Terminal())
    assert seen("sweep", "--wait", "--json") == 0
    assert "[##########..............................]  25%" in seen.err
    assert seen.err.endswith(" \r")
    assert seen.document["state"] == "finished"


@pytest.mark.parametrize(("result", "exit_status"), [("detected", 0), ("missed", 1), ("superseded", 2)])
def test_the_result_of_a_drill_is_the_exit_status(api: FakeApi, cli: Invocation, result: str, exit_status: int) -> None:
    """Detected is 0, missed is 1, and a drill that proved nothing is 2."""
    api.routes["GET", "/v1/drills/d-1"] = [drill_document(), drill_document(result=result)]
    assert cli("drill", "fingerprint", "--wait") == exit_status
    assert result in cli.out


def test_waiting_ends_at_the_timeout(api: FakeApi, cli: Invocation) -> None:
    """A drill without a result within --timeout is an error that says how long was waited."""
    api.routes["GET", "/v1/drills/d-1"] = drill_document()
    assert cli("drill", "fingerprint", "--wait", "--timeout", "3") == 2
    assert "has not finished within 3 s" in cli.err
    assert cli.clock.seconds == pytest.approx(3, abs=0.5)


def test_ctrl_c_while_waiting_exits_130_quietly(api: FakeApi, cli: Invocation) -> None:
    """An interrupted wait says nothing and exits 130."""
    api.routes["GET", "/v1/sweeps/s-1"] = sweep_document()
    cli.clock.interrupt_after = 2
    assert cli("sweep", "--wait") == 130
    assert (cli.out, cli.err) == ("", "")


# --- watch


def test_watch_repaints_until_ctrl_c(api: FakeApi) -> None:
    """On a terminal each screen overwrites the one before; Ctrl-C on a clean server exits 0."""
    watching = Invocation(api.url, stdout=Terminal(), clock=TickingClock(interrupt_after=3))
    assert watching("watch", "--interval", "5") == 0
    assert watching.out.count("\x1b[H") == 3
    assert watching.clock.seconds == 15


def test_watch_shows_read_rates_from_counter_deltas(api: FakeApi, cli: Invocation) -> None:
    """The read column is the growth of the counters over the time between two ticks."""
    later = group_document(counters={"read_bytes": {"sweep": 4_300_786_432}})
    api.routes["GET", "/v1/status"] = [status_document(), status_document(tick_at=NOW + 2, groups=[later])]
    cli.clock.interrupt_after = 2
    cli("watch")
    assert "1.0 GB/s" in cli.out


def test_watch_remembers_a_mismatch(api: FakeApi, cli: Invocation) -> None:
    """A mismatch on any screen is exit status 1, also when a restart of the server has wiped the counters since."""
    wrong = status_document(groups=[group_document(counters={"mismatches": mismatches(1)})])
    api.routes["GET", "/v1/status"] = [status_document(), wrong, status_document()]
    cli.clock.interrupt_after = 3
    assert cli("watch", "--json") == 1
    assert len([json.loads(line) for line in cli.out.splitlines()]) == 3


def test_watch_waits_for_a_server_that_went_away(api: FakeApi, cli: Invocation) -> None:
    """After the first screen an unreachable server is said and asked again."""
    api.routes["GET", "/v1/status"] = [status_document(), (502, b"gone"), status_document()]
    cli.clock.interrupt_after = 3
    assert cli("watch") == 0
    assert "trying again" in cli.err
    assert cli.out.count("CLEAN") == 2


@pytest.mark.parametrize("changes", [{"started_at": NOW}, {"tick_at": NOW}], ids=["restart", "no tick"])
def test_no_rate_is_made_up(changes: dict[str, Any]) -> None:
    """After a restart, or without a tick in between, the read rate is not known."""
    assert read_rates(status_document(), status_document(**{"tick_at": NOW + 2, **changes})) == {"full": None}


# --- refused and unreachable


def test_nobody_there_is_said_with_the_address(cli: Invocation) -> None:
    """Connection refused: the URL, what to check, exit status 2, and no traceback."""
    with socket.socket() as bound_but_silent:
        bound_but_silent.bind(("127.0.0.1", 0))
        cli.url = f"http://127.0.0.1:{bound_but_silent.getsockname()[1]}"
        assert cli("status") == 2
    assert f"nobody listens at {cli.url} (connection refused)" in cli.err
    assert "KV_CANARY=on" in cli.err
    assert len(cli.err.splitlines()) == 2


def test_a_server_that_does_not_answer_is_given_up(cli: Invocation) -> None:
    """A listener that never answers runs into --timeout."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cli.url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert cli("status", "--timeout", "0.05") == 2
    assert "within 0.05 s" in cli.err


@pytest.mark.parametrize(
    "answer",
    [(404, {"detail": "Not Found"}), (200, b"<html>"), (200, [1]), (302, b""), (200, {"status": "ok"})],
    ids=["other 404", "html", "list", "redirect", "other document"],
)
def test_another_server_is_not_taken_for_a_canary(api: FakeApi, cli: Invocation, answer: Any) -> None:
    """The engine's own port, or a proxy, is told apart from a clean canary."""
    api.routes["GET", "/v1/status"] = answer if answer[1] != [1] else (200, b"[1]")
    assert cli("status") == 2
    assert "but not KV Canary" in cli.err


def test_a_refusal_is_passed_on(api: FakeApi, cli: Invocation) -> None:
    """A problem document becomes one clear line and exit status 2."""
    api.routes["PATCH", "/v1/settings"] = problem(
        422, "Unprocessable Content", "budget: '7' is not allowed; allowed: 1%"
    )
    assert cli("settings", "budget=7") == 2
    assert cli.err == "kv-canary: Unprocessable Content: budget: '7' is not allowed; allowed: 1%\n"


def test_with_json_a_refusal_is_json_too(cli: Invocation) -> None:
    """Programs get an object with `error` and the HTTP status."""
    assert cli("--json", "incidents", "i-9") == 2
    assert cli.document == {"error": "Not Found: there is no /v1/incidents/i-9 here", "http_status": 404}


@pytest.mark.parametrize(
    "arguments",
    [
        "drill nonsense",
        "--bogus",
        "sweep --timeout -3",
        "settings budget",
        "settings budget=1% budget=2%",
        "status --url ftp://x",
    ],
)
def test_wrong_use_is_json_too(cli: Invocation, arguments: str) -> None:
    """Wrong use exits 2 with at most two lines on stderr, and JSON for programs."""
    assert run([*arguments.split(), "--json"], Surroundings(stdout=cli.stdout, stderr=cli.stderr, environment={})) == 2
    assert "error" in cli.document
    assert len(cli.err.splitlines()) <= 2


def test_an_answer_of_another_shape_is_no_traceback(api: FakeApi, cli: Invocation) -> None:
    """A document that this version cannot read is an error, not a stack trace and not a clean bill."""
    api.routes["GET", "/v1/groups"] = {"groups": 7}
    assert cli("groups") == 2
    assert "does not understand the answer" in cli.err


# --- token and address


def test_the_token_goes_with_changes_only(api: FakeApi, cli: Invocation, tmp_path: Path) -> None:
    """Writes carry the token of --token-file or KV_CANARY_TOKEN_FILE, reads never do."""
    token_file = tmp_path / "token"
    token_file.write_text("s3cret\n")
    cli("status", "--token-file", str(token_file))
    cli("disable", "--token-file", str(token_file))
    cli.environment["KV_CANARY_TOKEN_FILE"] = str(token_file)
    cli("enable")
    assert api.tokens == [None, "Bearer s3cret", "Bearer s3cret"]


def test_a_missing_token_is_asked_for(api: FakeApi, cli: Invocation) -> None:
    """401 without a token says how to give one."""
    api.routes["PUT", "/v1/canary"] = problem(401, "Unauthorized", "the bearer token is missing")
    assert cli("disable") == 2
    assert "--token-file FILE or set KV_CANARY_TOKEN_FILE" in cli.err


def test_a_wrong_token_is_never_shown(api: FakeApi, cli: Invocation, tmp_path: Path) -> None:
    """401 with a token names its file, not the token."""
    (tmp_path / "token").write_text("s3cret")
    api.routes["PUT", "/v1/canary"] = problem(401, "Unauthorized", "the bearer token is not valid")
    assert cli("disable", "--token-file", str(tmp_path / "token")) == 2
    assert str(tmp_path / "token") in cli.err
    assert "s3cret" not in cli.err


@pytest.mark.parametrize(
    "content", [None, "", "two words", "caf\u00e9"], ids=["no file", "empty", "two words", "not ASCII"]
)
def test_a_token_file_that_cannot_serve_is_refused_before_anything_is_sent(
    api: FakeApi, cli: Invocation, tmp_path: Path, content: str | None
) -> None:
    """An unusable token file is an error that names it; the server is not asked."""
    token_file = tmp_path / "token"
    if content is not None:
        token_file.write_text(content, encoding="utf-8")
    assert cli("disable", "--token-file", str(token_file)) == 2
    assert str(token_file) in cli.err
    assert api.requests == []


def test_the_address_comes_from_the_settings(api: FakeApi, cli: Invocation) -> None:
    """Without --url the port of KV_CANARY_PORT is asked; a server bound to every address is asked on loopback."""
    environment = {"KV_CANARY_HOST": "0.0.0.0", "KV_CANARY_PORT": api.url.rpartition(":")[2]}
    assert run(["status"], Surroundings(stdout=cli.stdout, stderr=cli.stderr, environment=environment)) == 0


def test_a_wrong_setting_does_not_keep_anybody_from_a_named_server(cli: Invocation) -> None:
    """With --url a variable that the settings refuse is no obstacle; without it, it is an error that names it."""
    cli.environment["KV_CANARY_BUGDET"] = "1%"
    assert cli("status") == 0
    assert run(["status"], Surroundings(stdout=cli.stdout, stderr=cli.stderr, environment=cli.environment)) == 2
    assert "KV_CANARY_BUGDET" in cli.err


# --- the process


def test_the_command_is_quick_to_start() -> None:
    """Importing the command imports none of the heavy packages."""
    heavy = "{'torch', 'numpy', 'numba', 'fastapi', 'pydantic', 'uvicorn', 'prometheus_client', 'transformers'}"
    code = f"import sys, kv_canary.cli; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_python_m_is_the_command() -> None:
    """`python -m kv_canary --version` prints the version."""
    done = subprocess.run(
        [sys.executable, "-m", "kv_canary", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == f"kv-canary {__version__}\n"


def test_a_reader_that_has_enough_does_not_change_the_exit_status(api: FakeApi) -> None:
    """Into a closed pipe (`| head`) there is no complaint, and the verdict stays."""
    api.routes["GET", "/v1/status"] = status_document(last_incident=incident_document())
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "kv_canary", "status", "--url", api.url]
    with open(writing, "wb") as closed_pipe:
        done = subprocess.run(command, stdout=closed_pipe, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (1, b"")


# --- demo


@pytest.fixture
def install_demos(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts entry points in the place of those that are installed."""

    def install(**values: str) -> None:
        points = [EntryPoint(name, value, demo_module.ENTRY_POINT_GROUP) for name, value in values.items()]
        monkeypatch.setattr(demo_module, "entry_points", lambda group: points)

    return install


def echo_demo(arguments: list[str]) -> int:
    """A demo: prints its arguments, and has a help of its own."""
    print("demo:", *arguments)
    return 7


def needy_demo(arguments: list[str]) -> int:
    """A demo that finds out late that a package is missing."""
    raise ModuleNotFoundError("No module named 'psutil'", name="psutil")


@pytest.mark.parametrize("arguments", [["--help"], ["--model", "tiny", "--json"], []])
def test_everything_after_demo_is_the_demos_own(
    install_demos: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    """Options after `demo`, --help too, reach the entry point as they are, and its exit status is ours."""
    monkeypatch.setitem(sys.modules, "echo_demo", sys.modules[__name__])
    install_demos(transformers="echo_demo:echo_demo")
    assert main(["demo", *arguments]) == 7
    assert capsys.readouterr().out == " ".join(["demo:", *arguments]) + "\n"


def test_engine_picks_the_demo_by_name(
    install_demos: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--engine is taken out, the rest is handed over."""
    monkeypatch.setitem(sys.modules, "echo_demo", sys.modules[__name__])
    install_demos(transformers="nowhere:main", vllm="echo_demo:echo_demo")
    assert main(["demo", "--port", "1", "--engine", "vllm"]) == 7
    assert capsys.readouterr().out == "demo: --port 1\n"


@pytest.mark.parametrize(
    "entry", ["a_package_that_is_not_there.demo:main", "echo_demo:needy_demo"], ids=["early", "late"]
)
def test_a_missing_package_gives_one_line(
    install_demos: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    """Without the demo's packages, at import or later, the user is told what to install."""
    monkeypatch.setitem(sys.modules, "echo_demo", sys.modules[__name__])
    install_demos(transformers=entry)
    assert main(["demo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("is not installed: pip install 'kv-canary[demo]'")


def test_an_unknown_engine_lists_those_that_have_a_demo(
    install_demos: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong --engine names the engines that can be picked."""
    install_demos(transformers="nowhere:main")
    assert main(["demo", "--engine", "vlm"]) == 2
    assert "'vlm'; there are: transformers" in capsys.readouterr().err


# --- numbers


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (render.size(0), "0 B"),
        (render.size(1023), "1023 B"),
        (render.size(1_572_864), "1.5 MiB"),
        (render.size(128 << 30), "128 GiB"),
        (render.rate(2e9), "2.0 GB/s"),
        (render.rate(999_700.0), "1.0 MB/s"),
        (render.rate(None), "-"),
        (render.duration(0.04), "40 ms"),
        (render.duration(9.97), "10 s"),
        (render.duration(59.7), "1 min"),
        (render.duration(7500), "2 h 5 min"),
        (render.duration(273_600), "3 d 4 h"),
        (render.duration(float("inf")), "-"),
        (render.age(None, NOW), "never"),
        (render.age(NOW + 5, NOW), "just now"),
        (render.age(NOW - 192, NOW), "3 min 12 s ago"),
        (render.percent(0.999), "99%"),
        (render.bar(0.999, 4), "[###.]"),
        (render.bar(1.0, 4), "[####]"),
        (render.moment(0), "1970-01-01 00:00:00 UTC"),
    ],
)
def test_numbers_are_written_for_people(written: str, expected: str) -> None:
    """Sizes, rates, durations and ages have a unit, and neither a bar nor a percentage is full before the end."""
    assert written == expected
