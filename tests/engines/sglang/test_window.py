"""A real SGLang server with sliding-window layers: two pools, and a map from one to the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from builders.sglang_serving import Server, serving, traffic

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def windowed(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Sliding-window and full layers.

    SGLang's attention for a CPU reads the window's rows by the numbers of full slots, so what this server says means
    nothing; pools, maps, allocators and the prefix cache are what they are on a GPU. Both pools are of one size, so
    that those numbers exist.
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
