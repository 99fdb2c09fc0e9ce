"""The demo as its users meet it: scraped by a real Prometheus, steered by the real command line, ended by a signal."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from builders.live import OPENMETRICS, Prometheus, Server, running_demo, stays, wait_until

pytestmark = pytest.mark.stack

SUMMARY_FIELDS = {
    *("engine", "engine_version", "device", "seconds", "steps", "requests_finished", "tokens_generated"),
    *("claims", "pages_sealed", "pages_verified", "read_bytes", "sweeps_completed", "superseded"),
    *("incidents", "drills", "errors"),
}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed; make test-stack installs it")
def test_the_text_format_passes_promtool(demo: Server) -> None:
    """It parses, and no rule of the linter is broken: help texts, units, suffixes, counters."""
    text = demo.ask("GET", "/metrics").content
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_openmetrics_passes_the_strict_parser(demo: Server) -> None:
    """Not `promtool check metrics`, which reads the text format only, whatever it is given.

    Legal OpenMetrics fails there in two ways (promtool 2.42): `# TYPE kv_canary_sweeps counter` names the family
    without `_total`, so that the samples count as others and the linter says `kv_canary_sweeps_total no help text`; and
    an exemplar ends it with `expected integer as timestamp, got "#"`. `# EOF` passes as a comment. That Prometheus
    itself reads this format is what `test_an_alert_drill_counts_and_its_exemplar_leads_to_the_incident` shows.
    """
    demo.ask("POST", "/v1/drills", {"kind": "fingerprint", "alert": True})
    wait_until(lambda: "# {incident=" in openmetrics(demo), 5, "there is an exemplar to be parsed")
    response = demo.ask("GET", "/metrics", Accept=OPENMETRICS)
    assert response.headers["Content-Type"].startswith(OPENMETRICS)
    assert response.text.endswith("# EOF\n")
    families = {family.name: family for family in parse_openmetrics(response.text)}
    assert families["kv_canary_mismatches"].type == "counter"
    assert families["kv_canary_sweep_duration_seconds"].type == "histogram"


def test_prometheus_scrapes_it_by_address_and_through_its_list_of_targets(demo: Server, prometheus: Prometheus) -> None:
    def both_up() -> bool:
        found = prometheus.targets()
        return {job for job, target in found.items() if target["health"] == "up"} == {"static", "discovered"}

    wait_until(both_up, 15, "both targets are up")
    for target in prometheus.targets().values():
        assert target["lastError"] == ""
        assert target["labels"]["instance"] == urlsplit(demo.url).netloc


def test_the_rate_of_bytes_read_by_sweeps_is_above_zero(prometheus: Prometheus) -> None:
    """What an alert on a canary that has stopped reading is made of."""
    query = 'rate(kv_canary_read_bytes_total{purpose="sweep"}[30s]) > 0'
    found = wait_until(lambda: prometheus.query(query), 15, query)
    assert {series["metric"]["group"] for series in found} == {"full"}


@pytest.mark.parametrize("kind", ["fingerprint", "content"])
def test_a_drill_from_the_command_line_is_detected_in_seconds(demo: Server, prometheus: Prometheus, kind: str) -> None:
    """It says which page, stripe and owner; a flipped byte is put back, and no real mismatch is counted for it."""
    drill = detected_drill(demo, kind)
    pages = demo.ask("GET", f"/v1/groups/{drill['group']}/pages").json()
    assert pages["pages"] == 96
    # Never one of the trash pages in front, which no owner has.
    assert 0 < pages["first_page"] <= drill["page"] < pages["first_page"] + 96
    assert drill["stripe"] >= 0
    status, incident, _ = demo.command("incidents", drill["incident"])
    assert status == 0
    assert (incident["page"], incident["drill"], incident["source"]) == (drill["page"], drill["id"], "drill")
    assert [finding["stripe"] for finding in incident["stripes"]] == [drill["stripe"]]
    assert {"owner", "previous_owner", "owners"} <= incident.keys()
    assert incident["page_state"] in ("sealed", "free")

    count = demo.total("kv_canary_drills_total", kind=kind, result="detected")
    query = f'kv_canary_drills_total{{kind="{kind}",result="detected",job="static"}} >= {count:g}'
    wait_until(lambda: prometheus.query(query), 10, "Prometheus has scraped what came of the drill")
    real = 'increase(kv_canary_mismatches_total{source="real"}[1m])'
    increases = wait_until(lambda: prometheus.query(real), 10, "Prometheus has two scrapes to take an increase from")
    assert {series["value"][1] for series in increases} == {"0"}
    assert demo.command("status")[0] == 0


def detected_drill(demo: Server, kind: str) -> dict[str, Any]:
    """A byte that was flipped on a page which the engine took again at that very moment stays with its new owner, who
    overwrites it. That is right and rare: then another drill has to show it.
    """
    for _ in range(3):
        status, drill, seconds = demo.command("drill", kind, "--wait")
        assert (status, drill["result"]) == (0, "detected")
        assert seconds < 5
        if kind == "fingerprint" or drill["detail"] == "the byte is back":
            return drill
    pytest.fail(f"the byte is not back: {drill}")


def test_switched_off_it_reads_nothing_and_the_engine_goes_on(demo: Server) -> None:
    """Off within a second; on again it reads again, covers what the engine holds, and calls nothing wrong."""

    def read_bytes() -> float:
        return demo.total("kv_canary_read_bytes_total")

    def generated() -> list[int]:
        return [int(rate.replace(",", "")) for rate in re.findall(r"([\d,]+) tokens/s", demo.log)]

    lines = len(generated())
    try:
        demo.ask("PUT", "/v1/canary", {"enabled": False})
        wait_until(lambda: demo.total("kv_canary_enabled") == 0, 1, "/metrics says that it is off")
        flat = stays(read_bytes, 2)
        # The first line may speak of the time before; all of the second one is about the time since.
        wait_until(lambda: len(generated()) >= lines + 2, 30, "the demo says twice how fast the engine is")
        assert generated()[-1] > 0
        assert read_bytes() == flat
    finally:
        demo.ask("PUT", "/v1/canary", {"enabled": True})
    wait_until(lambda: read_bytes() > flat, 5, "bytes are read again")
    wait_until(lambda: demo.total("kv_canary_pages", state="unknown") == 0, 30, "every page is covered again")
    assert demo.total("kv_canary_mismatches_total", source="real") == 0
    assert demo.total("kv_canary_errors_total") == 0


def test_an_alert_drill_counts_and_its_exemplar_leads_to_the_incident(demo: Server, prometheus: Prometheus) -> None:
    """In OpenMetrics, and in Prometheus, which then has read OpenMetrics: the text format has no exemplars."""
    before = demo.total("kv_canary_mismatches_total", source="drill")
    status, drill, _ = demo.command("drill", "fingerprint", "--alert", "--wait")
    assert (status, drill["result"]) == (0, "detected")
    assert demo.total("kv_canary_mismatches_total", source="drill") == before + 1
    assert demo.total("kv_canary_mismatches_total", source="real") == 0

    wanted = {"incident": drill["incident"], "page": str(drill["page"])}
    exemplars = [
        sample.exemplar.labels
        for family in parse_openmetrics(openmetrics(demo))
        for sample in family.samples
        if sample.exemplar and sample.labels["source"] == "drill"
    ]
    assert wanted in exemplars
    wait_until(
        lambda: wanted in [one["labels"] for one in prometheus.exemplars('kv_canary_mismatches_total{source="drill"}')],
        10,
        "Prometheus has the exemplar",
    )


def openmetrics(demo: Server) -> str:
    return demo.ask("GET", "/metrics", Accept=OPENMETRICS).text


def test_a_second_demo_takes_the_next_free_port_and_says_so(demo: Server, tmp_path: Path) -> None:
    taken = urlsplit(demo.url).port or 0
    with running_demo(tmp_path, port=taken) as second:
        port = urlsplit(second.url).port or 0
        assert taken < port < taken + 20
        assert second.document("/v1/status")["pid"] == second.process.pid == second.ready["pid"]
        assert f"port {taken} is in use; the canary answers on {second.url} instead" in second.log
        assert demo.document("/v1/status")["pid"] == demo.process.pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_with_a_summary(tmp_path: Path, number: signal.Signals) -> None:
    with running_demo(tmp_path) as server:
        server.process.send_signal(number)
        assert server.process.wait(15) == 0
        summary = server.summary
    assert summary.keys() >= SUMMARY_FIELDS
    assert (summary["engine"], summary["device"]) == ("transformers", "cpu")
    assert (summary["incidents"], summary["errors"]) == (0, {})
    assert summary["pages_verified"] > 0
    assert "Traceback" not in server.log
