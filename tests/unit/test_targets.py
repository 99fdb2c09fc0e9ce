"""`/v1/targets` finds the sidecars of all local ranks, and is never the reason for a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from kv_canary.http.targets import LocalTargets, default_folder


def entry(folder: Path, **changes: object) -> None:
    values = {"target": "127.0.0.1:1", "rank": 1, "pid": os.getpid(), "session": os.getsid(0), **changes}
    (folder / f"{values['pid']}-{values['target'].rsplit(':', 1)[1]}.json").write_text(json.dumps(values))


def test_all_ranks_of_the_session_are_listed_in_order(tmp_path: Path) -> None:
    third, first = (LocalTargets(f"127.0.0.1:{port}", rank, folder=tmp_path) for port, rank in ((12, 2), (10, 0)))
    entry(tmp_path, target="127.0.0.1:11", rank=1)
    assert third.listed() == first.listed() == ["127.0.0.1:10", "127.0.0.1:11", "127.0.0.1:12"]


def test_another_servers_ranks_are_not_listed(tmp_path: Path) -> None:
    targets = LocalTargets("127.0.0.1:10", 0, folder=tmp_path)
    entry(tmp_path, session=os.getsid(0) + 1)
    assert targets.listed() == ["127.0.0.1:10"]


def test_a_rank_that_died_is_passed_over_and_its_file_removed(tmp_path: Path) -> None:
    targets = LocalTargets("127.0.0.1:10", 0, folder=tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    entry(tmp_path, pid=gone.pid)
    assert targets.listed() == ["127.0.0.1:10"]
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_a_stopped_rank_is_gone(tmp_path: Path) -> None:
    one, other = (LocalTargets(f"127.0.0.1:{port}", port, folder=tmp_path) for port in (10, 11))
    other.remove()
    other.remove()
    assert one.listed() == ["127.0.0.1:10"]


def test_a_broken_file_is_passed_over(tmp_path: Path) -> None:
    targets = LocalTargets("127.0.0.1:10", 0, folder=tmp_path)
    (tmp_path / "1-2.json").write_text("{not json")
    (tmp_path / "1-3.json").write_text("[]")
    assert targets.listed() == ["127.0.0.1:10"]


def test_without_a_folder_a_sidecar_knows_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    targets = LocalTargets("127.0.0.1:10", 0, folder=tmp_path / "file" / "folder")
    assert targets.listed() == ["127.0.0.1:10"]
    targets.remove()


def test_the_folder_is_this_users_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    LocalTargets("127.0.0.1:10", 0)
    assert default_folder() == tmp_path / "kv-canary"
    assert default_folder().stat().st_mode & 0o777 == 0o700
