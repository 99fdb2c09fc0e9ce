"""The page map: what each byte says, how many pages share one, and that it is built in short pieces."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest

from builders.control import FakeControl
from builders.harness import Harness, ManualClock, make_memory
from builders.harness import make_group as group_of
from builders.requests import assert_problem, call
from builders.snapshots import make_group, make_incident, make_snapshot
from kv_canary import Budget, Settings
from kv_canary.commands import Command, LookAtPage, MapPages
from kv_canary.errors import ConflictError, NotFoundError
from kv_canary.gate import EngineGate
from kv_canary.guard import GroupGuard
from kv_canary.http.api import CanaryApi, build_app
from kv_canary.incidents import IncidentLog
from kv_canary.ledger import HostLedger
from kv_canary.page_map import CELLS, DRILLED, MAP_STATES, MISMATCHED, NO_AGE, PageMapper
from kv_canary.sidecar import Sidecar
from kv_canary.snapshot import PageDetails, PageMap
from kv_canary.suspension import Suspension
from kv_canary.verifier import Verifier

DEADLINE = 60.0


class Desk:
    """A mapper, its incidents and its suspension; `breaths` counts how often it let go of the GIL."""

    def __init__(self, clock: ManualClock) -> None:
        self.incidents = IncidentLog(100)
        self.suspension = Suspension(monotonic=clock.monotonic, synchronize=lambda: None)
        self.breaths = 0
        self.mapper = PageMapper(
            incidents=self.incidents, suspension=self.suspension, time=clock.time, breathe=self.breathe
        )

    def breathe(self) -> None:
        self.breaths += 1


def looks(found: PageMap) -> list[tuple[str, int]]:
    """State and age class of each cell."""
    return [(found.states[(cell >> 3) & 7], cell & 7) for cell in found.cells]


@pytest.fixture
def small() -> tuple[Harness, Desk]:
    harness = Harness(make_memory(8))
    return harness, Desk(harness.clock)


def test_each_page_has_its_state_and_the_age_of_its_verification(small: tuple[Harness, Desk]) -> None:
    """Of a page that is being written there is none; a class is how many bounds have passed."""
    harness, desk = small
    harness.sealed(0, 1, 2)
    harness.clock.now += 31
    harness.verifier.verify(np.array([1]), "sweep")
    harness.clock.now += 91
    harness.verifier.verify(np.array([2]), "sweep")
    harness.ledger.allocate([3], "b")
    harness.ledger.allocate([4], "b")
    harness.ledger.release([4], "b")
    harness.ledger.free([4])
    harness.apply()
    found = desk.mapper.map(harness.guard, DEADLINE)
    assert found.age_bounds_seconds == (15.0, 30.0, 60.0, 120.0)
    assert looks(found) == [
        ("sealed", 4),
        ("sealed", 3),
        ("sealed", 0),
        ("open", NO_AGE),
        ("free", 0),
        *[("unknown", NO_AGE)] * 3,
    ]
    assert (found.first_page, found.pages, found.pages_per_cell) == (0, 8, 1)
    assert found.counts["sealed"] == (1, 0, 0, 1, 1, 0)
    assert found.counts["unknown"] == (0, 0, 0, 0, 0, 3)
    assert sum(map(sum, found.counts.values())) == 8


def test_the_page_of_an_incident_is_marked_and_a_drill_s_in_another_way(small: tuple[Harness, Desk]) -> None:
    """Of this group, and only of pages that there are."""
    harness, desk = small
    harness.sealed(0, 1, 2)
    for number, (page, source, group) in enumerate(
        [(1, "real", "full"), (2, "drill", "full"), (2, "real", "other"), (99, "real", "full"), (1, "real", "full")]
    ):
        desk.incidents.add(make_incident(number, page=page, source=source, group=group))
    found = desk.mapper.map(harness.guard, DEADLINE)
    assert [cell & (MISMATCHED | DRILLED) for cell in found.cells[:4]] == [0, MISMATCHED, DRILLED, 0]
    assert (found.mismatched_pages, found.drilled_pages) == (1, 1)


def test_pages_that_went_bad_with_another_are_marked_too(small: tuple[Harness, Desk]) -> None:
    harness, desk = small
    harness.sealed(0, 1, 2)
    desk.incidents.add(make_incident(1, page=2, group="full", neighbours=(0, 99), pages_total=3))
    found = desk.mapper.map(harness.guard, DEADLINE)
    assert [cell & MISMATCHED for cell in found.cells[:3]] == [MISMATCHED, 0, MISMATCHED]
    assert found.mismatched_pages == 2


def test_nothing_is_known_while_the_hooks_are_silent(small: tuple[Harness, Desk]) -> None:
    """As the counts of states in the status have it."""
    harness, desk = small
    harness.sealed(0, 1)
    harness.gate.recording = False
    assert set(looks(desk.mapper.map(harness.guard, DEADLINE))) == {("unknown", NO_AGE)}


def test_time_in_which_nothing_could_be_read_makes_no_page_older(small: tuple[Harness, Desk]) -> None:
    harness, desk = small
    harness.sealed(0)
    desk.suspension.suspend("sleep", 1)
    harness.clock.now += 1000
    desk.suspension.resume("sleep")
    assert looks(desk.mapper.map(harness.guard, DEADLINE))[0] == ("sealed", 0)
    harness.clock.now += 20
    assert looks(desk.mapper.map(harness.guard, DEADLINE))[0] == ("sealed", 1)


def test_while_the_engine_has_its_memory_the_last_map_is_shown(small: tuple[Harness, Desk]) -> None:
    """With the time at which it was right; without one it is refused, as is a look at one page."""
    harness, desk = small
    desk.suspension.suspend("cuda graph capture", 1)
    for ask in (lambda: desk.mapper.map(harness.guard, DEADLINE), lambda: desk.mapper.details(harness.guard, 0)):
        with pytest.raises(ConflictError, match="cuda graph capture"):
            ask()
    desk.suspension.resume("cuda graph capture")
    first = desk.mapper.map(harness.guard, DEADLINE)
    desk.suspension.suspend("sleep", 1)
    harness.clock.now += 5
    assert desk.mapper.map(harness.guard, DEADLINE) is first


def large(pages: int, clock: ManualClock, first_page: int = 0) -> GroupGuard:
    """A guard of that many sealed pages, verified now; no memory stands behind it."""
    from kv_canary.fingerprint.cpu import CpuTable

    base = Harness(make_memory(4))
    group = base.group
    object.__setattr__(group, "pages", pages)
    object.__setattr__(group, "first_page", first_page)
    ledger, gate = HostLedger("full", pages), EngineGate()
    gate.recording = True
    ledger.adopt(range(pages), 7, "a")
    assert ledger.catch_up(seconds=60)
    verifier = Verifier(group, ledger, CpuTable(base.group), watch=gate.watch, monotonic=clock.monotonic)
    verifier._sealed_generation[:] = ledger.live_generations
    verifier._good_at[:] = clock.monotonic()
    return GroupGuard(verifier=verifier, gate=gate)


def test_a_million_pages_are_few_cells_built_in_many_pieces() -> None:
    """A cell shows its worst page, the last one has what is left, and the GIL is let go every few thousand pages."""
    clock = ManualClock()
    desk, guard = Desk(clock), large(1_000_003, clock)
    guard.ledger.allocate([20], "b")  # a second owner: the page is open now
    guard.ledger.catch_up(seconds=1)
    guard.verifier._good_at[1_000_002] -= 70
    desk.incidents.add(make_incident(1, page=500_000))
    found = desk.mapper.map(guard, DEADLINE)
    each = found.pages_per_cell
    assert (each, len(found.cells)) == (16, -(-1_000_003 // 16))
    assert len(found.cells) <= CELLS
    assert looks(found)[0] == ("sealed", 0)
    assert looks(found)[20 // each] == ("open", NO_AGE)
    assert looks(found)[-1] == ("sealed", 3)
    assert found.cells[500_000 // each] & MISMATCHED
    assert (sum(map(sum, found.counts.values())), found.mismatched_pages) == (1_000_003, 1)
    assert desk.breaths >= 1_000_003 // 4096


@pytest.mark.parametrize("pages", [1, 2, 2047, 2048, 2049, CELLS, CELLS + 1, 3 * CELLS - 1])
@pytest.mark.parametrize("first_page", [0, 1])
def test_every_page_is_in_one_cell(pages: int, first_page: int) -> None:
    """At every border: of a slice, of a cell, of the number of cells."""
    clock = ManualClock()
    desk, guard = Desk(clock), large(pages + first_page, clock, first_page)
    desk.incidents.add(make_incident(1, page=first_page))
    desk.incidents.add(make_incident(2, page=first_page + pages - 1))
    found = desk.mapper.map(guard, DEADLINE)
    assert len(found.cells) == -(-pages // found.pages_per_cell) <= CELLS
    assert found.counts["sealed"] == (pages, 0, 0, 0, 0, 0)
    assert found.cells[0] & MISMATCHED
    assert found.cells[-1] & MISMATCHED
    assert sum(cell >= MISMATCHED for cell in found.cells) == min(2, len(found.cells))


def test_a_page_that_another_group_holds_is_elsewhere() -> None:
    """Groups that lay their pages over the same bytes each show the other's as not theirs."""
    clock = ManualClock()
    harness, desk = Harness(make_memory(4), clock), Desk(clock)
    ledger = HostLedger("shared", 4, groups=2)
    verifier = Verifier(
        harness.group, ledger, harness.verifier.table, place=1, watch=harness.gate.watch, monotonic=clock.monotonic
    )
    ledger.allocate([0], "a", group=0)
    ledger.allocate([1], "a", group=1)
    ledger.catch_up(seconds=1)
    found = desk.mapper.map(GroupGuard(verifier=verifier, gate=harness.gate), DEADLINE)
    assert [state for state, _ in looks(found)] == ["elsewhere", "open", "unknown", "unknown"]


def test_one_page_in_words(small: tuple[Harness, Desk]) -> None:
    harness, desk = small
    harness.sealed(3, owner="request-9")
    harness.clock.now += 4
    found = desk.mapper.details(harness.guard, 3)
    assert (found.state, found.owner, found.owners, found.age_seconds) == ("sealed", "request-9", 1, 4.0)
    assert desk.mapper.details(harness.guard, 5).age_seconds is None
    for page in (-1, 8, 10**30):
        with pytest.raises(NotFoundError, match="0 to 7"):
            desk.mapper.details(harness.guard, page)


def test_the_canary_thread_answers_and_a_look_changes_nothing() -> None:
    """Also when the canary is off: then every page is unknown."""
    memory = make_memory(16)
    gate, ledger = EngineGate(), HostLedger("full", 16)
    sidecar = Sidecar(Settings(budget=Budget(share=1.0), port=0), engine="test", engine_version="0", seed=0)
    sidecar.start()
    try:
        sidecar.attach(gate, [(ledger, [group_of(memory)])])
        found = sidecar.submit(MapPages(group="full")).result(5)
        assert [MAP_STATES[cell >> 3] for cell in found.cells] == ["unknown"] * 16
        assert sidecar.submit(LookAtPage(group="full", page=15)).result(5).state == "unknown"
        for command in (MapPages(group="none"), LookAtPage(group="none", page=0)):
            with pytest.raises(NotFoundError, match="groups: full"):
                sidecar.submit(command).result(5)
    finally:
        sidecar.detach()


# Over HTTP


def page_map(**overrides: Any) -> PageMap:
    values: dict[str, Any] = {
        "group": "full",
        "built_at": 1.7e9,
        "first_page": 1,
        "pages": 3,
        "pages_per_cell": 1,
        "states": MAP_STATES,
        "age_bounds_seconds": (15.0, 30.0, 60.0, 120.0),
        "counts": {"sealed": (3, 0, 0, 0, 0, 0)},
        "mismatched_pages": 1,
        "drilled_pages": 0,
        "cells": bytes([16, 16, 144]),
    }
    return PageMap(**values | overrides)


def answering(answer: Any) -> FakeControl:
    def carry_out(command: Command) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return FakeControl(make_snapshot(groups=(make_group("full"), make_group("swa"))), answer=carry_out)


def app_of(control: FakeControl, **options: Any) -> CanaryApi:
    return build_app(control, settings=Settings(), **options)


def test_the_map_goes_out_as_base64_with_what_its_bits_mean() -> None:
    control = answering(page_map())
    response = call(app_of(control), "GET", "/v1/groups/full/pages")
    assert response.headers["content-type"] == "application/json"
    document = response.json()
    assert document["cells"] == "EBCQ"
    assert document["states"] == list(MAP_STATES)
    assert document["counts"] == {"sealed": [3, 0, 0, 0, 0, 0]}
    assert control.commands == [MapPages(group="full")]
    schema = app_of(control).openapi()
    assert set(document) == set(schema["components"]["schemas"]["PageMapAnswer"]["properties"])


def test_many_viewers_cost_one_build_a_second_and_group(monkeypatch: pytest.MonkeyPatch) -> None:
    control = answering(page_map())
    app = app_of(control)
    for _ in range(5):
        call(app, "GET", "/v1/groups/full/pages")
    assert control.commands == [MapPages(group="full")]
    call(app, "GET", "/v1/groups/swa/pages")
    assert control.commands == [MapPages(group="full"), MapPages(group="swa")]
    monkeypatch.setattr("kv_canary.http.pages.KEPT_SECONDS", -1.0)
    fresh = answering(page_map())
    app = app_of(fresh)
    for _ in range(3):
        call(app, "GET", "/v1/groups/full/pages")
    assert len(fresh.commands) == 3


def test_whoever_asks_while_a_map_is_built_waits_for_that_one() -> None:
    control = answering(page_map())
    control._silent = True
    app, asked, submit = app_of(control), asyncio.Event(), control.submit

    def noting(command: Command) -> Any:
        asked.set()
        return submit(command)

    control.submit = noting  # type: ignore[method-assign]

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:10470") as client:
            asking = [asyncio.create_task(client.get("/v1/groups/full/pages")) for _ in range(4)]
            await asyncio.wait_for(asked.wait(), 5)
            asking[0].cancel()  # gone: the others still get theirs
            await asyncio.wait(asking[:1])
            control.futures[0].set_result(page_map())
            return [(await one).status_code for one in asking[1:]]

    assert asyncio.run(ask()) == [200, 200, 200]
    assert len(control.commands) == 1


def test_a_map_that_could_not_be_had_is_not_kept() -> None:
    """The next viewer asks again."""
    control = answering(ConflictError("nothing can be looked at now"))
    app = app_of(control)
    for _ in range(2):
        assert_problem(call(app, "GET", "/v1/groups/full/pages"), 409, "looked at")
    assert len(control.commands) == 2


@pytest.mark.parametrize("path", ["/v1/groups/none/pages", "/v1/groups/none/pages/1"])
def test_an_unknown_group_is_a_404_that_costs_the_canary_thread_nothing(path: str) -> None:
    control = answering(page_map())
    assert_problem(call(app_of(control), "GET", path), 404, "none", "full, swa")
    assert control.commands == []


def test_a_canary_thread_that_does_not_answer_is_a_503() -> None:
    control = answering(None)
    control._silent = True
    app = app_of(control, command_timeout_seconds=0.01)
    assert_problem(call(app, "GET", "/v1/groups/full/pages"), 503, "MapPages")
    assert_problem(call(app, "GET", "/v1/groups/full/pages/1"), 503, "LookAtPage")


def test_one_page_over_http() -> None:
    found = PageDetails(
        group="full", page=7, state="sealed", generation=2, owner="<b>", previous_owner=None, owners=1,
        changed_step=9, age_seconds=0.5,
    )  # fmt: skip
    control = answering(found)
    document = call(app_of(control), "GET", "/v1/groups/full/pages/7").json()
    assert (document["page"], document["owner"], document["age_seconds"]) == (7, "<b>", 0.5)
    assert control.commands == [LookAtPage(group="full", page=7)]
    assert_problem(call(app_of(control), "GET", "/v1/groups/full/pages/many"), 422, "page")


def test_a_look_is_not_an_audited_write(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kv_canary.audit")
    call(app_of(answering(page_map())), "GET", "/v1/groups/full/pages")
    assert [record for record in caplog.records if record.name == "kv_canary.audit"] == []
