"""The files under deploy/ agree with each other, with the daemon, and with the runbook. Nothing is started."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from kv_canary.metric_table import METRICS
from kv_canary.settings import DEFAULT_PORT, Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
RULES = DEPLOY / "prometheus" / "rules" / "kv-canary.yml"
SEVERITIES = {
    "KVCanaryMismatch": "critical",
    "KVCanaryStalled": "critical",
    "KVCanaryDrillMissed": "critical",
    "KVCanarySweepOverdue": "warning",
    "KVCanaryGroupDisabled": "warning",
    "KVCanaryErrors": "warning",
    "KVCanaryTargetDown": "warning",
    "KVCanaryUncovered": "info",
}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def rules() -> list[dict[str, Any]]:
    return [rule for group in read(RULES)["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def server(name: str) -> dict[str, Any]:
    """The pod of a Deployment."""
    return dict(read(KUBERNETES / f"{name}.yaml")["spec"]["template"])


def test_these_are_the_alerts_and_how_loud_they_are() -> None:
    assert {name: rule["labels"]["severity"] for name, rule in alerts().items()} == SEVERITIES


@pytest.mark.parametrize("name", SEVERITIES)
def test_an_alert_says_what_happened_and_leads_to_its_chapter_of_the_runbook(name: str) -> None:
    annotations = alerts()[name]["annotations"]
    assert annotations.keys() == {"summary", "description", "runbook_url"}
    assert "$labels.instance" in annotations["summary"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project.get("urls", {}).get("Repository")
    page, _, chapter = annotations["runbook_url"].rpartition("#")
    assert page == (f"{repository}/blob/main/docs/runbook.md" if repository else "docs/runbook.md")
    runbook = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    assert chapter in [heading.lower() for heading in re.findall(r"^#+ (\w+)$", runbook, re.MULTILINE)]


def test_rules_ask_for_metrics_and_labels_that_are_exported() -> None:
    exported = {spec.name: set(spec.labels) for spec in METRICS}
    for rule in rules():
        for metric, matchers in re.findall(r"\b(kv_canary_\w+)(?:\{([^}]*)\})?", rule["expr"]):
            assert metric in exported, rule["expr"]
            assert set(re.findall(r"(\w+)=", matchers)) <= exported[metric], rule["expr"]


def test_every_alert_and_record_has_a_unit_test() -> None:
    """That those pass is tested with promtool (tests/stack)."""
    texts = "".join(file.read_text() for file in (DEPLOY / "prometheus" / "tests").glob("*.yml"))
    for name in SEVERITIES:
        quiet, fires = (
            len(re.findall(pattern, texts))
            for pattern in (
                rf"eval_time: \w+, alertname: {name}\}}",
                rf"alertname: {name}(?:, exp_alerts: \*|\n +exp_alerts:)",
            )
        )
        assert quiet, f"{name}: no test that it stays quiet"
        assert fires, f"{name}: no test that it fires"
    for rule in rules():
        assert rule.get("record", "") in texts


def test_the_operator_gets_the_same_groups() -> None:
    assert read(KUBERNETES / "prometheus-rule.yaml")["spec"]["groups"] == read(RULES)["groups"]


def test_the_names_of_the_jobs_are_those_that_the_rule_on_targets_looks_for() -> None:
    pattern = re.search(r'job=~"([^"]+)"', alerts()["KVCanaryTargetDown"]["expr"])
    assert pattern
    (scrape,) = read(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"]
    monitor = read(KUBERNETES / "pod-monitor.yaml")["metadata"]["name"]
    for job in (scrape["job_name"], f"inference/{monitor}"):
        assert re.fullmatch(pattern[1], job)
    assert not re.fullmatch(pattern[1], "node")


def test_alertmanager_wakes_nobody_for_a_drill() -> None:
    """The first route that matches takes it, so the one for drills stands before the one for what is critical."""
    routes = read(DEPLOY / "alertmanager" / "alertmanager.yml")["route"]["routes"]
    matched = [" ".join(route["matchers"]) for route in routes]
    assert matched.index('alertname="KVCanaryMismatch" source="drill"') < matched.index('severity="critical"')


@pytest.mark.parametrize(("name", "ranks"), [("vllm", 2), ("sglang", 1)])
def test_a_server_on_kubernetes_is_guarded_scraped_and_hardened(name: str, ranks: int) -> None:
    pod = server(name)
    container = pod["spec"]["containers"][0]
    settings = {variable["name"]: variable["value"] for variable in container["env"]}
    canary = Settings.from_environment({key: value for key, value in settings.items() if key.startswith("KV_CANARY")})
    assert canary.enabled

    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {name: port for name, port in ports.items() if name.startswith("canary")} == {
        f"canary-{rank}": DEFAULT_PORT + rank for rank in range(ranks)
    }
    monitor = read(KUBERNETES / "pod-monitor.yaml")["spec"]
    assert ports.keys() - {"http"} <= {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]}
    assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    policy = read(KUBERNETES / "network-policy.yaml")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (limited,) = [rule["ports"][0] for rule in policy["ingress"] if "from" in rule]
    assert (limited["port"], limited["endPort"]) == (DEFAULT_PORT, DEFAULT_PORT + 7)

    assert canary.token_file is not None
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mount = mounts[str(canary.token_file.parent)]
    assert "subPath" not in mount  # such a file is never rotated
    secret = read(KUBERNETES / "token-secret.yaml")
    assert volumes[mount["name"]]["secret"]["secretName"] == secret["metadata"]["name"]
    assert list(secret["stringData"]) == [canary.token_file.name]

    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "/tmp" in mounts
    probes = [container[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe")]
    assert probes == ["http", "http"]  # the canary fails open: its health must not decide about the server's
    assert "livenessProbe" not in container


def test_the_image_runs_as_the_uid_that_kubernetes_names() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (uid,) = re.findall(r"^USER (\d+):\d+$", text, re.MULTILINE)
    assert {server(name)["spec"]["securityContext"]["runAsUser"] for name in ("vllm", "sglang")} == {int(uid)}
    assert f"EXPOSE {DEFAULT_PORT}" in text


def test_the_image_carries_the_version_of_the_package() -> None:
    version = (ROOT / "daemon" / "kv_canary" / "_version.py").read_text(encoding="utf-8")
    (labelled,) = re.findall(r"^ARG VERSION=(.*)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert f'"{labelled}"' in version


def test_compose_mounts_what_there_is_and_publishes_on_loopback_only() -> None:
    compose = read(DEPLOY / "compose.yaml")
    for name, service in compose["services"].items():
        assert set(service["profiles"]) <= {"demo", "test"}, name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        for volume in service.get("volumes", ()):
            if volume.startswith("./"):
                assert (DEPLOY / volume.split(":")[0]).exists(), volume
    assert compose["services"]["canary"]["read_only"]
    assert {name for name, service in compose["services"].items() if "test" not in service["profiles"]} == {"grafana"}


def test_nothing_delivered_names_a_registry() -> None:
    """Images are pulled from wherever the cluster pulls, and packages come from wherever pip is set up to look."""
    for file in (*DEPLOY.rglob("*.y*ml"), ROOT / "Dockerfile"):
        for image in re.findall(r"(?:image: |BASE=)(\S+)", file.read_text(encoding="utf-8")):
            assert "." not in image.removeprefix("${").split("/")[0].split(":")[0], f"{file}: {image}"
