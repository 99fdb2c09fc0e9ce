"""A real SGLang server on a CPU, guarded: silent under legal traffic, loud at every fault.

Traffic and faults are asked for over HTTP; faults happen inside the scheduler's process, on its own thread, through a
plugin of the tests (`inside/`). A server is started once for all tests that look at it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from builders.sglang_serving import Server, serving, traffic

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

SLOTS = 30_000  # verified on each of the servers under traffic


@dataclass(frozen=True)
class Form:
    """Page size, overlap scheduling, and which of SGLang's two tree cores."""

    page: int
    overlap: bool
    core: str

    def __str__(self) -> str:
        return f"page{self.page}-{'overlap' if self.overlap else 'serial'}-{self.core}"

    @property
    def options(self) -> dict[str, Any]:
        # a cache for a fraction of what is asked for: chunked prefill, eviction, retraction
        return {"page_size": self.page, "disable_overlap_schedule": not self.overlap, "max_total_tokens": 480}


FORMS = [Form(1, True, "rust"), Form(4, False, "python"), Form(4, True, "rust"), Form(1, False, "python")]
every_form = pytest.mark.parametrize("under_traffic", FORMS, indirect=True, ids=str)
two_forms = pytest.mark.parametrize("under_traffic", FORMS[:2], indirect=True, ids=str)
python_core = pytest.mark.parametrize("under_traffic", FORMS[1:2], indirect=True, ids=str)


@pytest.fixture(scope="module")
def under_traffic(
    request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, Server]]:
    form: Form = request.param
    environment = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": form.core}
    with serving(llama, tmp_path_factory.mktemp("server"), canary=environment, **form.options) as server:
        for seed in range(3):
            server.all(traffic(16, seed))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(server.abandon, traffic(4, 7)))
            list(pool.map(server.converse, [_turns(20 + seed) for seed in range(4)]))
        server.all(traffic(12, 8))
        yield form.page, server


def _turns(seed: int) -> list[list[int]]:
    return [prompt[:40] for prompt in traffic(3, seed)]


@every_form
def test_pressure_raises_nothing_and_every_slot_is_seen(under_traffic: tuple[int, Server]) -> None:
    """Shared prefixes, chunked prefill, eviction, requests that hang up, sessions; then the idle server is swept."""
    page, server = under_traffic
    seen = server.inside("report", SLOTS // page)
    assert seen["incidents"] == []
    assert seen["errors"] == {}
    assert seen["state"] == "running"
    assert seen["recording"]
    assert seen["verified"] * page >= SLOTS
    (group,) = seen["groups"].values()
    assert group["claims"] > 20
    assert group["claims_not_covered"] == 0
    assert group["pages"]["unknown"] == 0
    assert group["uncovered"] == []
    assert server.inside("audit") > 0
    assert server.inside("report")["incidents"] == []


@two_forms
def test_the_padding_page_is_never_looked_at(under_traffic: tuple[int, Server]) -> None:
    _, server = under_traffic
    server.inside("flip", "full", 0, 0, 3, 1)
    before = server.inside("report")["verified"]
    assert server.inside("report", before + 1000)["incidents"] == []


@two_forms
def test_a_flipped_bit_is_found_in_every_buffer(under_traffic: tuple[int, Server]) -> None:
    """K and V of each layer, first and last sealed page, first and last byte."""
    _, server = under_traffic
    pages = server.inside("sealed", "full")
    for buffer, layer in enumerate(server.inside("buffers", "full")):
        for page, byte in ((pages[0], 0), (pages[-1], -1)):
            known = len(server.inside("report")["incidents"])
            server.inside("flip", "full", buffer, page, byte, 5)
            (incident,) = server.inside("wait_for_incidents", known)
            server.inside("flip", "full", buffer, page, byte, 5)
            assert (incident["check"], incident["page"], incident["persistence"]) == ("content", page, "persistent")
            assert layer in incident["layers"]  # rows this small share a fingerprint


@two_forms
def test_a_late_write_into_a_freed_slot_is_found(under_traffic: tuple[int, Server]) -> None:
    _, server = under_traffic
    server.flush()
    page = server.inside("free", "full")[5]
    known = len(server.inside("report")["incidents"])
    server.inside("flip", "full", 1, page, 2, 0)
    (incident,) = server.inside("wait_for_incidents", known)
    server.inside("flip", "full", 1, page, 2, 0)
    assert (incident["check"], incident["page"]) == ("free_page", page)


@two_forms
def test_a_page_freed_twice_is_found(under_traffic: tuple[int, Server]) -> None:
    """The engine's own accounting stays balanced."""
    _, server = under_traffic
    server.flush()
    known = len(server.inside("report")["incidents"])
    page = server.inside("free_twice")
    incidents = server.inside("wait_for_incidents", known)
    assert {(one["check"], one["page"]) for one in incidents} == {("ownership", page)}
    server.flush()


@python_core
def test_a_node_that_points_at_recycled_slots_is_found_at_the_hit(under_traffic: tuple[int, Server]) -> None:
    """The tree says that a prefix lies in slots that hold other tokens. Only in one core can a node be reached."""
    _, server = under_traffic
    server.flush()
    first, second = [11] * 40 + [12], [13] * 40 + [14]
    server.generate(first, tokens=2)
    server.generate(second, tokens=2)
    server.inside("repoint", first[:40], server.inside("match", second[:40]))
    known = len(server.inside("report")["incidents"])
    server.generate([*first[:40], 15], tokens=2)
    incidents = server.inside("wait_for_incidents", known)
    assert incidents
    assert {one["check"] for one in incidents} <= {"identity", "ownership"}
    assert "identity" in {one["check"] for one in incidents}
    server.flush()


@two_forms
def test_after_the_faults_traffic_is_silent_again(under_traffic: tuple[int, Server]) -> None:
    _, server = under_traffic
    server.flush()
    known = len(server.inside("report")["incidents"])
    server.all(traffic(12, 9))
    assert server.inside("report", 1000)["incidents"][known:] == []


@two_forms
def test_off_and_on_under_load_raises_nothing(under_traffic: tuple[int, Server]) -> None:
    """What was written while the canary was off is adopted from the engine's own tables."""
    _, server = under_traffic
    known = len(server.inside("report")["incidents"])
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(server.generate, prompt, tokens=60) for prompt in traffic(8, 10)]
        server.inside("switch", False)
        assert server.inside("report")["recording"] is False
        server.all(traffic(2, 11))
        server.inside("switch", True)
        for one in running:
            one.result()
    server.all(traffic(8, 12))
    seen = server.inside("report")
    assert seen["recording"]
    assert seen["incidents"][known:] == []
    assert server.inside("report", seen["verified"] + 2000)["incidents"][known:] == []


@two_forms
def test_a_hook_that_throws_leaves_the_server_serving(under_traffic: tuple[int, Server]) -> None:
    _, server = under_traffic
    server.flush()
    prompts = traffic(4, 13)
    tokens = [server.generate(prompt) for prompt in prompts]
    server.inside("break", "ledger", "write")
    server.flush()
    assert [server.generate(prompt) for prompt in prompts] == tokens
    (group,) = server.inside("report")["groups"].values()
    assert group["enabled"] is False
    assert "broken on purpose" in group["reason"]
    server.inside("mend", "ledger", "write")
    server.inside("switch", True)
    server.all(prompts)
    assert server.inside("report")["recording"]
