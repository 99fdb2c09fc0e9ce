"""Rules and configuration as Prometheus's and Alertmanager's own tools see them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
ALERTMANAGER = DEPLOY / "alertmanager" / "alertmanager.yml"

pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(
        shutil.which("promtool") is None or shutil.which("amtool") is None,
        reason="promtool or amtool is not installed; make test-stack installs them",
    ),
]


def said(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    """`check config` looks for the files that it names, the rules and the credentials, too."""
    answer = said("promtool", "check", "config", PROMETHEUS / "prometheus.yml")
    assert "11 rules found" in answer


@pytest.mark.parametrize("file", sorted((PROMETHEUS / "tests").glob("*.yml")), ids=lambda file: file.stem)
def test_each_alert_fires_when_it_should_and_only_then(file: Path) -> None:
    """The very first mismatch too, even when it was counted before the first scrape."""
    said("promtool", "test", "rules", file)


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        ("alertname=KVCanaryMismatch severity=critical source=real", "page"),
        ("alertname=KVCanaryMismatch severity=critical source=drill", "rehearsal"),
        ("alertname=KVCanaryStalled severity=critical", "page"),
        ("alertname=KVCanaryErrors severity=warning", "ticket"),
        ("alertname=KVCanaryUncovered severity=info", "ticket"),
    ],
)
def test_an_alert_goes_to_whom_it_concerns(labels: str, receiver: str) -> None:
    said("amtool", "check-config", ALERTMANAGER)
    assert said("amtool", "config", "routes", "test", f"--config.file={ALERTMANAGER}", *labels.split()) == receiver
