"""`KV_CANARY=on vllm serve MODEL` with two tensor-parallel ranks: a sidecar each, fed by one scheduler."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from builders.vllm_serving import RANKS, Load, Serving, serving

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
PROMPT = [(7 * number) % 250 + 3 for number in range(120)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("serve")
    program = "import sys; from pathlib import Path; import models; models.build_llama(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", program, folder / "model"], cwd=HERE, check=True, timeout=120)
    canary = {"KV_CANARY_BUDGET": "3%", "KV_CANARY_ALLOW_CONTENT_DRILLS": "on"}
    with serving(folder / "model", folder, **canary) as running:
        yield running


def test_each_rank_has_a_sidecar_and_one_knows_all(server: Serving) -> None:
    assert len(server.canaries) == RANKS
    assert [server.status(rank)["rank"] for rank in range(RANKS)] == list(range(RANKS))
    ports = [int(url.rsplit(":", 1)[1]) for url in server.canaries]
    assert ports == [ports[0] + rank for rank in range(RANKS)]
    for url in server.canaries:
        (entry,) = httpx.get(f"{url}/v1/targets", timeout=60).json()
        assert [f"http://{target}" for target in entry["targets"]] == server.canaries


def test_load_raises_nothing_and_drills_and_switches_work_meanwhile(
    server: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    with Load(server, clients=2) as load:
        load.wait_for(30)
        for rank, url in enumerate(server.canaries):
            for kind in ("fingerprint", "content"):
                posted = httpx.post(f"{url}/v1/drills", json={"kind": kind}, timeout=60)
                assert posted.status_code == 202
                assert _drill(url, posted.json()["id"])["result"] == "detected", (rank, kind)
            assert httpx.put(f"{url}/v1/canary", json={"enabled": False}, timeout=60).status_code == 200
        load.wait_for(load.answers + 5)
        for url in server.canaries:
            assert httpx.get(f"{url}/v1/status", timeout=60).json()["state"] == "disabled"
            assert httpx.put(f"{url}/v1/canary", json={"enabled": True}, timeout=60).status_code == 200
        load.wait_for(load.answers + 20)
        latencies = [_scrape(url) for _ in range(10) for url in server.canaries]
    assert load.failures == []
    for rank in range(RANKS):
        until = time.monotonic() + 60
        while server.counters(rank)["verified_pages"] < 20_000 and time.monotonic() < until:
            time.sleep(0.2)
        seen = server.counters(rank)
        assert server.incidents(rank) == []
        assert server.status(rank)["errors"] == {}
        assert server.status(rank)["groups"][0]["pages"]["unknown"] == 0
        assert seen["verified_pages"] >= 20_000
        assert seen["claims"] > 20
    with capsys.disabled():
        cuts = statistics.quantiles(latencies, n=100)
        print(f"\nscrape under load: median {cuts[49] * 1e3:.1f} ms, p99 {cuts[98] * 1e3:.1f} ms")


def test_a_flipped_bit_is_found_on_its_rank_and_only_there(server: Serving) -> None:
    server.complete(PROMPT)
    for rank in range(RANKS):
        told = next(one for one in server.in_workers("canary_pages") if one["rank"] == rank)
        for layer in told["layers"]:
            known = [len(server.incidents(one)) for one in range(RANKS)]
            page = told["pages"][layer]
            server.in_workers("canary_flip", rank, page, layer, 33, 0x20)
            (incident,) = server.wait_for_incidents(rank, known[rank])
            server.in_workers("canary_flip", rank, page, layer, 33, 0x20)
            assert (incident["check"], incident["page"], incident["layers"]) == ("content", page, [layer])
            assert [len(server.incidents(one)) for one in range(RANKS)] == [
                count + (one == rank) for one, count in enumerate(known)
            ]


def test_quarantine_reaches_the_scheduler_from_any_rank(server: Serving) -> None:
    """The last rank alone has a bad page; the next request computes the prefix anew on both, and is right."""
    last = RANKS - 1
    prompt = [*PROMPT[::-1], 5]
    right = server.complete(prompt)
    page = max(server.in_workers("canary_pages")[last]["pages"])
    for url in server.canaries:
        patched = httpx.patch(f"{url}/v1/settings", json={"on_mismatch": "quarantine"}, timeout=60)
        assert patched.status_code == 200
    known = len(server.incidents(last))
    claims = server.counters(last)["claims"]
    server.in_workers("canary_spoil", last, page)
    assert server.wait_for_incidents(last, known)
    assert server.complete(prompt) == right
    server.complete(PROMPT)
    reactions = {one["reaction"] for one in server.incidents(last)[known:]}
    assert "quarantine: taken out of the prefix cache" in reactions
    assert claims < server.counters(last)["claims"]


def _drill(url: str, drill: str) -> dict[str, str]:
    until = time.monotonic() + 90
    while True:
        found: dict[str, str] = httpx.get(f"{url}/v1/drills/{drill}", timeout=60).json()
        if found["result"] != "running" or time.monotonic() > until:
            return found
        time.sleep(0.05)


def _scrape(url: str) -> float:
    started = time.perf_counter()
    httpx.get(f"{url}/metrics", timeout=60).raise_for_status()
    return time.perf_counter() - started
