"""One demo and one Prometheus for the whole run. Tests that end, or wrongly configure, a server start their own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from builders.containers import Engine, container_engine, why_no_engine
from builders.live import Prometheus, Server, running_demo, running_prometheus

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: static
    static_configs: [{{targets: ["{target}"]}}]
  - job_name: discovered
    http_sd_configs: [{{url: "{url}/v1/targets", refresh_interval: 1s}}]
"""


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_demo(tmp_path_factory.mktemp("demo")) as server:
        yield server


@pytest.fixture(scope="session")
def prometheus(demo: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrapes the demo every second, once by its address and once through its own list of targets."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed; make test-stack installs it")
    config = CONFIG.format(url=demo.url, target=urlsplit(demo.url).netloc)
    with running_prometheus(tmp_path_factory.mktemp("prometheus"), config) as server:
        yield server


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A Docker-compatible engine with the project's image in it: minutes, when nothing is built yet."""
    if missing := why_no_engine():
        pytest.skip(missing)
    with container_engine() as running:
        yield running
