"""Reactions, other forms of the engine, and what is not modelled: real SGLang servers, one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from builders.sglang_serving import running_engine, serving, traffic
from engines.sglang.models import LAYERS

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


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
        with serving(llama, folder, canary=canary, page_size=page, max_total_tokens=480) as server:
            answers.append([server.generate(prompt) for prompt in traffic(24, 4)])
            if canary is None:
                assert server.inside("report") is None
                assert server.inside("loaded") == ["kv_canary_sglang", "kv_canary_sglang.plugin"]
    assert answers[0] == answers[1]


def test_a_mode_that_is_not_modelled_is_off_with_its_reason(llama: Path, tmp_path: Path) -> None:
    """n-gram drafts: listed and named. Nothing is asked of the server: on a CPU SGLang cannot draft."""
    options = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4, "disable_overlap_schedule": True}
    with serving(llama, tmp_path, canary={}, **options) as server:
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


def test_an_engine_in_a_program_is_guarded_in_its_scheduler(llama: Path, tmp_path: Path) -> None:
    """`sglang.Engine`: no server, the scheduler is a process that it spawns."""
    with running_engine(llama, tmp_path, Path(__file__).with_name("engine_form.py")) as (server, answers):
        assert [len(answer) for answer in answers] == [16] * 16
        seen = server.inside("report", 5_000)
        assert (seen["state"], seen["incidents"], seen["errors"]) == ("running", [], {})
        assert seen["verified"] >= 5_000
        page = server.inside("sealed", "full")[3]
        server.inside("flip", "full", 2, page, 0, 6)
        (incident,) = server.inside("wait_for_incidents", 0)
        server.inside("flip", "full", 2, page, 0, 6)
        assert (incident["check"], incident["page"]) == ("content", page)
