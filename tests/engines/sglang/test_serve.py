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
from engines.sglang.models import LAYERS

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
        server.all(traffic(12, 8))
        yield form.page, server


@every_form
def test_pressure_raises_nothing_and_every_slot_is_seen(under_traffic: tuple[int, Server]) -> None:
    """Shared prefixes, chunked prefill, eviction, requests that hang up; then the idle server is swept."""
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


@pytest.mark.parametrize("page", [1, 4])
def test_a_bad_prefix_in_quarantine_is_computed_anew(llama: Path, tmp_path: Path, page: int) -> None:
    """Claimed, the bad page gives a wrong answer; in quarantine it is not claimed, though the server was idle."""
    prompt = traffic(1, 3)[0][:1] + [7, 8, 9] * 20
    with serving(llama, tmp_path, canary={}, page_size=page) as server:
        right = [server.generate(prompt), server.generate(prompt)]
        assert right[0] == right[1]
        bad = server.inside("match", prompt[:16])[12] // page
        server.inside("spoil", "full", bad)
        server.inside("wait_for_incidents", 0)
        assert server.generate(prompt) != right[0]
        server.inside("spoil", "full", bad)
        server.flush()
        server.generate(prompt)

        server.inside("react", "quarantine")
        known = len(server.inside("report")["incidents"])
        bad = server.inside("match", prompt[:16])[12] // page
        server.inside("spoil", "full", bad)
        (incident,) = server.inside("wait_for_incidents", known)
        assert incident["reaction"] == "quarantine: prefix hits end before the page until it is evicted"
        assert [server.generate(prompt) for _ in range(2)] == [right[0]] * 2
        assert server.inside("match", prompt)[: 12 // page * page] != []
        server.flush()  # the page goes back, and the quarantine ends with it
        server.generate(prompt)
        assert server.generate(prompt) == right[0]
        assert len(server.inside("match", prompt)) >= len(prompt) - page
        assert server.inside("report")["incidents"][known + 1 :] == []


def test_raise_stops_the_scheduler_with_the_incident(llama: Path, tmp_path: Path) -> None:
    with serving(llama, tmp_path, canary={"KV_CANARY_ON_MISMATCH": "raise"}) as server:
        server.all(traffic(4, 1))
        page = server.inside("sealed", "full")[0]
        try:
            server.inside("flip", "full", 0, page, 5, 1)
            server.generate(traffic(1, 2)[0], seconds=10)
        except Exception:  # noqa: BLE001 - the server goes down, as it was told to
            pass
        text = server.log.read_text()
    assert "CanaryMismatchError" in text
    assert f"page {page} of group full" in text


@pytest.mark.parametrize("page", [1, 4])
def test_tokens_are_the_same_with_the_canary_on_and_off(llama: Path, tmp_path: Path, page: int) -> None:
    """One request after the other: the same schedule."""
    answers = []
    for number, canary in enumerate((None, {})):
        folder = tmp_path / str(number)
        folder.mkdir()
        with serving(llama, folder, canary=canary, **Form(page, True, "rust").options) as server:
            answers.append([server.generate(prompt) for prompt in traffic(24, 4)])
            if canary is None:
                assert server.inside("report") is None
                assert server.inside("loaded") == ["kv_canary_sglang", "kv_canary_sglang.plugin"]
    assert answers[0] == answers[1]


def test_a_mode_that_is_not_modelled_is_off_with_its_reason(llama: Path, tmp_path: Path) -> None:
    """n-gram drafts: listed, named, and the server serves."""
    options = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4, "disable_overlap_schedule": True}
    with serving(llama, tmp_path, canary={}, **options) as server:
        assert len(server.generate([5, 6, 7] * 8)) == 24
        seen = server.inside("report")
    (group,) = seen["groups"].values()
    assert group["enabled"] is False
    assert group["reason"].startswith("speculative decoding")
    assert len(group["uncovered"]) == 2 * LAYERS
    assert seen["incidents"] == []


def test_a_bad_setting_is_said_and_the_server_serves(llama: Path, tmp_path: Path) -> None:
    with serving(llama, tmp_path, canary={"KV_CANARY_BUDGET": "a lot"}) as server:
        assert len(server.generate([5, 6, 7])) == 24
        assert server.inside("report") is None
        text = server.log.read_text()
    assert "KV_CANARY_BUDGET" in text
    assert "'a lot'" in text


@pytest.fixture(scope="module")
def windowed(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Sliding-window and full layers.

    SGLang's attention for a CPU reads the window's rows by the numbers of full slots, so what this server says means
    nothing; pools, maps, allocators and the prefix cache are what they are on a GPU. Both pools are of one size, so that
    those numbers exist.
    """
    options = {"page_size": 4, "max_total_tokens": 640, "swa_full_tokens_ratio": 1.0}
    with serving(hybrid, tmp_path_factory.mktemp("server"), canary={}, **options) as server:
        for seed in range(3):
            server.all(traffic(12, seed))
        yield server


def test_a_window_and_its_full_pages_raise_nothing(windowed: Server) -> None:
    seen = windowed.inside("report", 8_000)
    assert seen["incidents"] == []
    assert seen["errors"] == {}
    assert {name: (group["kind"], group["enabled"]) for name, group in seen["groups"].items()} == {
        "full": ("full", True),
        "swa": ("swa", True),
    }
    assert all(group["sealed"] > 50 and group["pages"]["unknown"] == 0 for group in seen["groups"].values())
    assert windowed.inside("audit") > 0
    assert windowed.inside("report")["incidents"] == []


def test_a_flipped_bit_in_the_window_is_found_in_its_group(windowed: Server) -> None:
    for buffer, layer in enumerate(windowed.inside("buffers", "swa")):
        page = windowed.inside("sealed", "swa")[buffer]
        known = len(windowed.inside("report")["incidents"])
        windowed.inside("flip", "swa", buffer, page, -1, 7)
        (incident,) = windowed.inside("wait_for_incidents", known)
        windowed.inside("flip", "swa", buffer, page, -1, 7)
        assert (incident["check"], incident["group"], incident["page"]) == ("content", "swa", page)
        assert layer in incident["layers"]


@pytest.mark.parametrize("seen_by", ["audit", "hit"])
def test_slots_that_trade_their_window_are_found(windowed: Server, seen_by: str) -> None:
    """Two full slots trade their slots of the window: the tokens there are not those that the full slots hold."""
    windowed.flush()
    prompts = [[21 + n] * 40 for n in range(2)]
    for prompt in prompts:
        windowed.generate([*prompt, 5], tokens=2)
    slots = [windowed.inside("match", prompt)[36:40] for prompt in prompts]
    known = len(windowed.inside("report")["incidents"])
    for first, second in zip(*slots, strict=True):
        windowed.inside("swap_window", first, second)
    pages = {slot // 4 for one in slots for slot in windowed.inside("window_of", one)}
    if seen_by == "audit":
        windowed.inside("audit")
    else:
        windowed.generate([*prompts[0], 6], tokens=2)
    incidents = windowed.inside("wait_for_incidents", known)
    for first, second in zip(*slots, strict=True):
        windowed.inside("swap_window", first, second)
    assert incidents
    assert {(one["check"], one["group"]) for one in incidents} == {("identity", "swa")}
    assert {one["page"] for one in incidents} <= pages
    windowed.flush()
