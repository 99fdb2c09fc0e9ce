"""A real corruption, from a wrong bit in a live cache to what an alert and a script see."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from builders.live import running, wait_until

pytestmark = pytest.mark.stack

SCRIPT = Path(__file__).with_name("corrupted_server.py")


def test_one_wrong_bit_counts_as_exactly_one_real_mismatch_and_the_exit_status_is_1(tmp_path: Path) -> None:
    """However often the page is read, claimed and recycled afterwards, while the engine goes on."""
    with running(tmp_path, [sys.executable, str(SCRIPT), str(tmp_path)]) as server:

        def real(**labels: str) -> float:
            return server.total("kv_canary_mismatches_total", source="real", **labels)

        assert real() == 0
        assert server.command("status")[0] == 0

        server.process.send_signal(signal.SIGUSR1)
        flipped = tmp_path / "flipped.json"
        wait_until(lambda: flipped.exists() or server.process.poll() is not None, 20, "the flipped bit is found")
        assert flipped.exists(), server.log
        page = json.loads(flipped.read_text())["page"]

        verified = server.total("kv_canary_verified_pages_total")
        step = server.document("/v1/status")["engine_step"]
        wait_until(
            lambda: (
                server.document("/v1/status")["engine_step"] > step + 100
                and server.total("kv_canary_verified_pages_total") > verified + 5_000
            ),
            60,
            "the engine goes on and every page is read many times over",
        )
        assert real() == 1
        assert real(check="content") + real(check="free_page") == 1

        status, document, _ = server.command("status")
        assert (status, document["last_incident"]["page"]) == (1, page)
        status, document, _ = server.command("incidents")
        assert status == 1
        assert [(one["source"], one["page"]) for one in document["incidents"]] == [("real", page)]
    assert server.process.returncode == 0
    assert "Traceback" not in server.log
