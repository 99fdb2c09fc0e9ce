"""The incident log: a bounded ring that is always right, and a file that may fail without harm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from builders.snapshots import make_incident
from kv_canary.incidents import IncidentLog, as_json

FULL_DISK = Path("/dev/full")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "incidents.jsonl"


@pytest.fixture
def logs() -> Iterator[list[IncidentLog]]:
    """Logs put in here are closed at the end."""
    opened: list[IncidentLog] = []
    yield opened
    for log in opened:
        log.close()


def make_log(logs: list[IncidentLog], capacity: int = 10, **options: Any) -> IncidentLog:
    logs.append(IncidentLog(capacity, **options))
    return logs[-1]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ids(log: IncidentLog) -> list[str]:
    return [incident.id for incident in log.published()]


# The ring


def test_the_ring_keeps_the_newest_oldest_first_and_counts_all() -> None:
    log = IncidentLog(3)
    for number in range(5):
        log.add(make_incident(number))
    assert ids(log) == ["incident-2", "incident-3", "incident-4"]
    assert log.total == 5


def test_ids_count_all_incidents_ever_and_never_repeat() -> None:
    log = IncidentLog(2)
    found = []
    for _ in range(4):
        found.append(log.next_id())
        log.add(make_incident(id=found[-1]))
    assert found == ["inc-000001", "inc-000002", "inc-000003", "inc-000004"]
    assert log.next_id() == log.next_id() == "inc-000005"


def test_what_is_published_is_the_same_object_until_something_changes() -> None:
    log = IncidentLog(3)
    assert log.published() is log.published()
    log.add(make_incident(1))
    first = log.published()
    assert log.published() is first
    log.set_reaction("incident-1", "quarantined")
    second = log.published()
    assert second is not first
    assert log.published() is second


def test_what_was_published_does_not_change_afterwards() -> None:
    log = IncidentLog(1)
    log.add(make_incident(1, reaction="log"))
    before = log.published()
    log.set_reaction("incident-1", "quarantined")
    log.add(make_incident(2))
    assert [(incident.id, incident.reaction) for incident in before] == [("incident-1", "log")]


def test_a_reaction_replaces_the_one_before_and_keeps_the_place() -> None:
    log = IncidentLog(3)
    for number in (1, 2):
        log.add(make_incident(number, reaction="pending"))
    log.set_reaction("incident-1", "quarantined")
    assert [(incident.id, incident.reaction) for incident in log.published()] == [
        ("incident-1", "quarantined"),
        ("incident-2", "pending"),
    ]
    assert log.total == 2


def test_a_reaction_to_an_incident_that_left_the_ring_changes_nothing(logs: list[IncidentLog], path: Path) -> None:
    log = make_log(logs, 1, path=path)
    log.add(make_incident(1))
    log.add(make_incident(2))
    before = log.published()
    log.set_reaction("incident-1", "quarantined")
    assert log.published() is before
    assert len(lines(path)) == 2


# The file


def test_no_path_writes_no_file_and_close_is_harmless() -> None:
    log = IncidentLog(3)
    log.add(make_incident(1))
    log.close()


def test_every_incident_is_a_line_of_json_the_same_as_the_api_s(logs: list[IncidentLog], path: Path) -> None:
    log = make_log(logs, path=path)
    incidents = [make_incident(1), make_incident(2, owner="request-é\n", previous_owner=None)]
    for incident in incidents:
        log.add(incident)
    assert lines(path) == [json.loads(json.dumps(as_json(incident))) for incident in incidents]


def test_a_line_is_there_as_soon_as_the_incident_is(logs: list[IncidentLog], path: Path) -> None:
    log = make_log(logs, path=path)
    for number in (1, 2):
        log.add(make_incident(number))
        assert len(lines(path)) == number


def test_a_reaction_appends_a_line_with_the_same_id(logs: list[IncidentLog], path: Path) -> None:
    log = make_log(logs, path=path)
    log.add(make_incident(1, reaction="pending"))
    log.set_reaction("incident-1", "quarantined")
    assert [(line["id"], line["reaction"]) for line in lines(path)] == [
        ("incident-1", "pending"),
        ("incident-1", "quarantined"),
    ]


def test_the_file_is_not_opened_before_the_first_incident(logs: list[IncidentLog], path: Path) -> None:
    make_log(logs, path=path)
    assert not path.exists()


def test_a_file_that_is_there_is_continued(logs: list[IncidentLog], path: Path) -> None:
    path.write_text('{"id": "of the last run"}\n')
    make_log(logs, path=path).add(make_incident(1))
    assert [line["id"] for line in lines(path)] == ["of the last run", "incident-1"]


def test_the_file_is_rotated_by_size_and_only_so_many_backups_are_kept(logs: list[IncidentLog], path: Path) -> None:
    size = len(json.dumps(as_json(make_incident(1)), separators=(",", ":"))) + 1
    log = make_log(logs, path=path, maximum_bytes=2 * size + 10, backups=2)
    for number in range(1, 10):
        log.add(make_incident(number))
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["incidents.jsonl", "incidents.jsonl.1", "incidents.jsonl.2"]
    assert [line["id"] for file in reversed(files) for line in lines(file)] == [f"incident-{n}" for n in range(5, 10)]
    assert all(file.stat().st_size <= 2 * size + 10 for file in files)


def test_the_host_s_logging_does_not_see_incidents(
    logs: list[IncidentLog], path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    make_log(logs, path=path).add(make_incident(1))
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


# A file that fails


def failing_path(kind: str, tmp_path: Path) -> Path:
    if kind == "full disk":
        if not FULL_DISK.exists():
            pytest.skip("this system has no /dev/full to play a full disk")
        return FULL_DISK
    return tmp_path / "no such folder" / "incidents.jsonl" if kind == "missing folder" else tmp_path


@pytest.mark.parametrize("kind", ["full disk", "missing folder", "folder"])
def test_a_write_that_fails_is_reported_each_time_and_loses_nothing_in_memory(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    errors: list[Exception] = []
    log = IncidentLog(10, path=failing_path(kind, tmp_path), on_error=errors.append)
    log.add(make_incident(1))
    log.add(make_incident(2))
    assert len(errors) == 2
    log.set_reaction("incident-2", "quarantined")
    assert len(errors) == 3
    assert all(isinstance(error, OSError) for error in errors)
    assert [(incident.id, incident.reaction) for incident in log.published()][1] == ("incident-2", "quarantined")
    assert (ids(log), log.total) == (["incident-1", "incident-2"], 2)
    log.close()
    assert capfd.readouterr() == ("", ""), "the host's standard error is not ours"


def test_closing_on_a_full_disk_does_not_raise_and_reports_nothing_twice(tmp_path: Path) -> None:
    errors: list[Exception] = []
    log = IncidentLog(10, path=failing_path("full disk", tmp_path), on_error=errors.append)
    log.add(make_incident(1))
    log.close()
    assert [type(error) for error in errors] == [OSError]


def test_a_file_that_can_be_written_again_is_written_again(logs: list[IncidentLog], tmp_path: Path) -> None:
    folder = tmp_path / "late"
    errors: list[Exception] = []
    log = make_log(logs, path=folder / "incidents.jsonl", on_error=errors.append)
    log.add(make_incident(1))
    folder.mkdir()
    log.add(make_incident(2))
    assert len(errors) == 1
    assert [line["id"] for line in lines(folder / "incidents.jsonl")] == ["incident-2"]
