"""What Prometheus gets from `/v1/targets` of a server in a container or on another machine."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from builders.control import FakeControl
from kv_canary.http.api import build_app
from kv_canary.settings import Settings


@pytest.mark.parametrize(
    ("listed", "asked", "answer"),
    [
        (["0.0.0.0:10470", "0.0.0.0:10471"], "10.0.0.7:10470", ["10.0.0.7:10470", "10.0.0.7:10471"]),
        (["[::]:10470"], "[fd00::7]:10470", ["[fd00::7]:10470"]),
        (["0.0.0.0:10470"], "gpu7:10470", ["gpu7:10470"]),
        (["0.0.0.0:10470"], "gpu7", ["gpu7:10470"]),
        (["10.1.1.1:10470"], "gpu7:10470", ["10.1.1.1:10470"]),
        (["127.0.0.1:10470"], "127.0.0.1:10470", ["127.0.0.1:10470"]),
    ],
)
def test_a_server_on_every_address_is_listed_under_the_name_that_it_was_asked_by(
    listed: list[str], asked: str, answer: list[str]
) -> None:
    """Under 127.0.0.1, Prometheus would scrape itself."""
    settings = Settings(host="0.0.0.0", allowed_hosts="gpu7")
    client = TestClient(build_app(FakeControl(), settings=settings, targets=lambda: listed))
    assert client.get("/v1/targets", headers={"Host": asked}).json() == [{"targets": answer, "labels": {}}]
