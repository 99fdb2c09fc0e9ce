"""Pages that went bad together are one incident; a flood is bounded, and its counters are exact."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from builders.harness import Harness
from kv_canary import Settings
from kv_canary.cause import UNKNOWN
from kv_canary.gate import EngineGate
from kv_canary.guard import Space
from kv_canary.incidents import IncidentLog
from kv_canary.merging import LineLimit, page_ranges
from kv_canary.reporter import Reporter
from kv_canary.snapshot import Incident


class Desk:
    """A harness of 32 sealed pages of owners a (0-15) and b (16-31), and a reporter that gets what a sweep finds."""

    def __init__(self, *, path: Path | None = None, capacity: int = 100, **settings: Any) -> None:
        self.harness = Harness()
        self.harness.sealed(*range(16), owner="a")
        self.harness.sealed(*range(16, 32), owner="b")
        self.log = IncidentLog(capacity, path=path)
        self.reporter = Reporter(
            self.log,
            settings=lambda: Settings(enabled=True, **settings),
            time=self.harness.clock.time,
            monotonic=self.harness.clock.monotonic,
            guards=[self.harness.guard],
        )

    def damage(self, *pages: int, start: int = 50) -> None:
        for page in pages:
            self.harness.memory[page, start : start + 20] ^= 0x5A

    def sweep(self) -> None:
        for finding in self.harness.sweep():
            self.reporter.finding(self.harness.guard, finding)

    def found(self, *pages: int) -> tuple[Incident, ...]:
        self.damage(*pages)
        self.sweep()
        return self.log.published()

    @property
    def counted(self) -> int:
        return sum(self.harness.verifier.counters.mismatches.values())


def pages_of(incidents: tuple[Incident, ...]) -> list[tuple[int, ...]]:
    return [(one.page, *one.neighbours) for one in incidents]


def test_adjacent_pages_of_one_sweep_are_one_incident_and_counted_each() -> None:
    desk = Desk()
    (incident,) = desk.found(14, 15, 16, 17)
    assert (incident.page, incident.neighbours, incident.pages_total) == (14, (15, 16, 17), 4)
    assert incident.summary.endswith("; 3 more pages alike: 15-17")
    assert desk.counted == 4
    assert desk.log.total == 1


def test_pages_of_one_owner_are_one_incident_wherever_they_lie() -> None:
    (incident,) = Desk().found(2, 5, 9)
    assert (incident.page, incident.neighbours) == (2, (5, 9))
    assert incident.summary.endswith("; 2 more pages alike: 5, 9")


def test_pages_of_two_owners_that_do_not_touch_are_two() -> None:
    assert pages_of(Desk().found(2, 20)) == [(2,), (20,)]


def test_two_causes_are_two_incidents() -> None:
    desk = Desk()
    desk.harness.memory[6] = 0
    assert pages_of(desk.found(5)) == [(5,), (6,)]


def test_flipped_bits_are_events_of_their_own() -> None:
    desk = Desk()
    for page in (3, 7):
        desk.harness.flip(page)
    desk.sweep()
    assert pages_of(desk.log.published()) == [(3,), (7,)]


def test_a_page_seen_good_after_the_first_was_found_is_another_event() -> None:
    desk = Desk()
    desk.found(4)
    desk.harness.clock.now += 0.5
    desk.sweep()  # 5 is good now
    desk.harness.clock.now += 0.5
    assert pages_of(desk.found(5)) == [(4,), (5,)]


def test_a_page_found_later_that_may_have_gone_bad_at_the_same_time_joins() -> None:
    desk = Desk()
    desk.damage(4, 5)
    four, five = desk.harness.sweep()
    desk.reporter.finding(desk.harness.guard, four)
    desk.harness.clock.now += 1.5
    desk.reporter.finding(desk.harness.guard, five)
    assert pages_of(desk.log.published()) == [(4, 5)]


def test_a_page_found_much_later_does_not_join() -> None:
    desk = Desk()
    desk.damage(4, 5)
    four, five = desk.harness.sweep()
    desk.reporter.finding(desk.harness.guard, four)
    desk.harness.clock.now += 2.5
    desk.reporter.finding(desk.harness.guard, five)
    assert pages_of(desk.log.published()) == [(4,), (5,)]


def test_a_page_that_joins_is_quarantined_under_the_incident_that_it_joined() -> None:
    desk = Desk(on_mismatch="quarantine")
    (incident,) = desk.found(8, 9)
    assert list(desk.harness.gate._quarantine) == [("full", 8, incident.id), ("full", 9, incident.id)]


def test_pages_do_not_join_an_incident_that_is_no_longer_kept() -> None:
    desk = Desk(capacity=1)
    desk.found(4)
    desk.harness.memory[20] = 0
    desk.sweep()  # pushes the first one out
    assert pages_of(desk.found(5)) == [(5,)]


def test_violations_of_one_event_are_one_incident() -> None:
    desk = Desk()
    space = Space(ledger=desk.harness.ledger, gate=EngineGate(), guards=[desk.harness.guard])
    desk.harness.ledger.allocate([3, 4, 5], "c")
    desk.harness.ledger.step()
    desk.harness.ledger.allocate([6], "c")
    desk.harness.apply()
    for violation in desk.harness.ledger.take_violations():
        desk.reporter.violation(space, violation)
    incidents = desk.log.published()
    assert pages_of(incidents) == [(3, 4, 5), (6,)]
    assert desk.counted == 4


def test_the_list_of_neighbours_is_bounded_and_the_count_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_canary.reporter.LISTED_NEIGHBOURS", 3)
    (incident,) = Desk().found(*range(10))
    assert (incident.neighbours, incident.pages_total) == ((1, 2, 3), 10)
    assert incident.summary.endswith("; 9 more pages alike: 1-3, ...")


def test_the_file_hears_of_pages_that_joined_once_a_tick(tmp_path: Path) -> None:
    desk = Desk(path=tmp_path / "incidents.jsonl")
    desk.found(*range(10))
    desk.reporter.tick()
    desk.reporter.tick()
    desk.log.close()
    lines = [json.loads(line) for line in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    assert [(line["id"], line["pages_total"]) for line in lines] == [("inc-000001", 1), ("inc-000001", 10)]


def test_a_flood_gets_some_lines_and_then_one_that_sums_up(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    desk.reporter._lines = LineLimit(lines=5)
    with caplog.at_level(logging.ERROR, "kv_canary"):
        for page in range(0, 32, 2):  # never two beside each other: each is an event of its own
            desk.harness.flip(page, 200)
        desk.sweep()
        lines = len(caplog.records)
        desk.reporter.tick()
        assert len(caplog.records) == lines
        desk.harness.clock.now += 11
        desk.reporter.tick()
        desk.reporter.tick()
    assert lines == 5
    assert len(caplog.records) == lines + 1
    assert "more wrong pages that got no line of their own" in caplog.messages[-1]
    assert "11 more wrong pages" in caplog.messages[-1]
    assert desk.counted == 16


def test_in_a_flood_only_so_many_causes_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    desk.reporter._looks = LineLimit(lines=3)
    looked: list[int] = []
    monkeypatch.setattr(
        "kv_canary.reporter.guess_cause", lambda finding, *_, **__: looked.append(finding.page) or UNKNOWN
    )
    desk.found(*range(0, 20, 2))
    assert len(looked) == 3
    desk.harness.clock.now += 11
    desk.found(21)
    assert looked[3:] == [21]
    assert desk.counted == 11


def test_a_line_limit_opens_again_after_its_stretch() -> None:
    limit = LineLimit(lines=2, seconds=10)
    assert [limit.allows(at) for at in (0.0, 1.0, 2.0, 3.0)] == [True, True, False, False]
    assert limit.due(9.0) == 0
    assert limit.due(10.0) == 2
    assert limit.due(30.0) == 0
    assert limit.allows(11.0)


@pytest.mark.parametrize(("pages", "text"), [({5}, "5"), ({7, 5, 8, 9}, "5, 7-9"), (set(), "")])
def test_ranges_of_pages(pages: set[int], text: str) -> None:
    assert page_ranges(pages) == text
