"""deploy/compose.yaml for real: the image, Prometheus and Alertmanager with the files that are delivered, unchanged.

What an SRE would try, in an order in which tests can share one stack; the last ones stop the canary. No Grafana runs:
its queries are asked of Prometheus here.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from builders.containers import ROOT, Engine
from builders.dashboards import filled_in, queries_of
from builders.live import START_SECONDS, Prometheus, command, free_port, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1800)]  # the first test waits for the images

TOKEN = "only-for-this-test"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
CHOSEN = {"job": "kv-canary", "instance": "canary:10470", "group": ".*", "deadline": "60", "__rate_interval": "1m"}


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The running services, by their published ports."""

    engine: Engine
    project: str
    variables: dict[str, str]
    token_file: Path
    prometheus: Prometheus

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.variables['KV_CANARY_PORT']}"

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return httpx.request(method, self.url + path, json=body, headers=headers, timeout=10, trust_env=False)

    def command(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        status, document, _ = command(self.url, *arguments, "--token-file", str(self.token_file))
        return status, document

    def arrived(self, **wanted: str) -> list[dict[str, Any]]:
        """What came to the webhooks: alerts with these labels, `receiver` and `status`."""
        url = f"http://127.0.0.1:{self.variables['RECEIVER_PORT']}"
        alerts = httpx.get(url, timeout=10, trust_env=False).json()
        return [
            alert
            for alert in alerts
            if wanted.items() <= {**alert["labels"], "receiver": alert["receiver"], "status": alert["status"]}.items()
        ]

    def compose(self, *arguments: str) -> str:
        return self.engine.compose(self.project, self.variables, *arguments)


@pytest.fixture(scope="module")
def stack(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    token_file = tmp_path_factory.mktemp("token") / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o444)  # the container's user has to read it
    for folder in list(token_file.parents)[:3]:
        folder.chmod(0o755)
    names = ("KV_CANARY_PORT", "PROMETHEUS_PORT", "ALERTMANAGER_PORT", "RECEIVER_PORT")
    variables = {name: str(free_port()) for name in names} | {"KV_CANARY_TOKEN_FILE": str(token_file)}
    prometheus = Prometheus(url=f"http://127.0.0.1:{variables['PROMETHEUS_PORT']}")
    running = Stack(
        engine=engine,
        project="kv-canary-test",
        variables=variables,
        token_file=token_file,
        prometheus=prometheus,
    )
    running.compose("down", "--volumes", "--timeout", "5")
    try:
        running.compose("up", "--detach", "--no-build")
        wait_until(lambda: _answers(f"{running.url}/readyz"), START_SECONDS, "the canary is ready")
        alertmanager = f"http://127.0.0.1:{variables['ALERTMANAGER_PORT']}"
        for name, url in (("Prometheus", prometheus.url), ("Alertmanager", alertmanager)):
            wait_until(lambda url=url: _answers(f"{url}/-/ready"), 30, f"{name} is ready")
        yield running
    finally:
        print(running.compose("logs", "--no-color", "--tail", "40"))  # pytest shows it if something failed
        running.compose("down", "--volumes", "--timeout", "5")


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_prometheus_finds_the_container_through_its_own_list(stack: Stack) -> None:
    """Bound to every address, it is listed under the name that it was asked by."""
    assert stack.ask("GET", "/v1/targets").json()[0]["targets"] == ["127.0.0.1:10470"]
    found = wait_until(
        lambda: [t for t in stack.prometheus.targets().values() if t["health"] == "up"], 60, "the target is up"
    )
    assert [(target["labels"]["job"], target["labels"]["instance"]) for target in found] == [
        ("kv-canary", CHOSEN["instance"])
    ]


def test_writes_need_the_mounted_token(stack: Stack) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert stack.ask("PUT", "/v1/canary", {"enabled": False}, **headers).status_code == 401
    assert stack.ask("GET", "/v1/canary").json()["enabled"]
    authorized = {"Authorization": f"Bearer {TOKEN}"}
    assert stack.ask("PATCH", "/v1/settings", {"drill_interval": 30}, **authorized).status_code == 200


def test_it_is_switched_and_drilled_over_the_published_port(stack: Stack) -> None:
    assert stack.command("disable")[0] == 0
    wait_until(lambda: not stack.ask("GET", "/v1/canary").json()["enabled"], 5, "it is off")
    assert stack.command("enable")[0] == 0
    wait_until(lambda: _answers(f"{stack.url}/readyz"), 30, "it is ready again")
    status, drill = stack.command("drill", "fingerprint", "--wait")
    assert (status, drill["result"]) == (0, "detected")


def test_all_rules_are_loaded_and_evaluated(stack: Stack) -> None:
    def evaluated() -> list[dict[str, Any]]:
        rules = [rule for group in stack.prometheus.rules() for rule in group["rules"]]
        return rules if rules and all(rule["health"] != "unknown" for rule in rules) else []

    rules = wait_until(evaluated, 60, "every rule was evaluated")
    assert {(rule["name"], rule["health"]) for rule in rules if rule["health"] != "ok"} == set()
    assert len([rule for rule in rules if rule["type"] == "alerting"]) == 8


def test_a_rehearsed_mismatch_reaches_the_webhook_within_a_minute(stack: Stack) -> None:
    """The scrape, the rule, Alertmanager's routing and the webhook; nobody's pager is among the receivers."""
    wait_until(lambda: stack.prometheus.query('kv_canary_mismatches_total{source="drill"}'), 60, "it was scraped")
    status, drill = stack.command("drill", "fingerprint", "--alert", "--wait")
    began = time.monotonic()
    assert (status, drill["result"]) == (0, "detected")
    firing = {"alertname": "KVCanaryMismatch", "source": "drill", "status": "firing"}
    alerts = wait_until(lambda: stack.arrived(**firing), 60, "the alert is at the webhook")
    print(f"at the webhook after {time.monotonic() - began:.1f} s")
    assert {alert["receiver"] for alert in alerts} == {"rehearsal"}
    assert alerts[0]["labels"]["severity"] == "critical"
    assert alerts[0]["annotations"]["summary"].startswith("Drill: ")
    assert stack.arrived(alertname="KVCanaryMismatch", source="real") == []


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_every_query_of_the_dashboard_has_data(stack: Stack, file: Path) -> None:
    """Right after a drill that counted, so that its mark is there too. Of a real mismatch there is no mark, since there
    was none: that query is asked without its last condition.
    """
    queries = dict(queries_of(json.loads(file.read_text())))
    assert len(queries) > 15
    for place, expression in queries.items():
        asked = filled_in(expression, CHOSEN)
        if place == "mark Mismatches":
            assert stack.prometheus.query(asked) == []
            asked = asked.removesuffix(" > 0")
        series = wait_until(lambda asked=asked: stack.prometheus.query(asked), 60, f"{place}: {asked}")
        values = [float(one["value"][1]) for one in series]
        assert not any(map(math.isnan, values)), f"{place}: {asked}"


def test_a_canary_thread_that_gives_up_is_an_alert_that_pages(stack: Stack) -> None:
    """And the engine goes on: the demo keeps generating."""
    container = stack.compose("ps", "--quiet", "canary").strip().splitlines()[-1]
    stack.engine.docker("kill", "--signal", "USR1", container)
    wait_until(lambda: stack.ask("GET", "/healthz").status_code == 503, 30, "it says that it is not healthy")
    lines = stack.engine.logs(container).count("tokens/s")
    alerts = wait_until(
        lambda: stack.arrived(alertname="KVCanaryStalled", status="firing"), 180, "the alert is at the webhook"
    )
    assert {(alert["receiver"], alert["labels"]["severity"]) for alert in alerts} == {("page", "critical")}
    assert stack.engine.logs(container).count("tokens/s") > lines + 5
    assert stack.arrived(alertname="KVCanaryErrors", component="thread", status="firing")


def test_the_rehearsed_mismatch_resolves_by_itself(stack: Stack) -> None:
    resolved = {"alertname": "KVCanaryMismatch", "source": "drill", "status": "resolved"}
    wait_until(lambda: stack.arrived(**resolved), 240, "the resolved alert is at the webhook")
