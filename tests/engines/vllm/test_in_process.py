"""The vLLM adapter on real engines: silent when all is right, loud when it is not. Each scenario runs in a process of
its own (`scenarios.py`) and is started once for all tests that look at it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
LAYERS = 2


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    program = "import sys; from pathlib import Path; import models; models.build_llama(Path(sys.argv[1]));"
    program += "models.build_hybrid(Path(sys.argv[2]))"
    found = {"llama": folder / "llama", "hybrid": folder / "hybrid"}
    subprocess.run([sys.executable, "-c", program, *map(str, found.values())], cwd=HERE, check=True, timeout=120)
    return found


@cache
def outcome(scenario: str, model: Path, canary: str = "on", on_mismatch: str = "log") -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KV_CANARY")}
    if canary == "on":
        environment |= {
            "KV_CANARY": "on",
            "KV_CANARY_PORT": "0",
            "KV_CANARY_BUDGET": "50%",
            "KV_CANARY_ON_MISMATCH": on_mismatch,
        }
    done = subprocess.run(
        [sys.executable, HERE / "scenarios.py", scenario, model],
        env=environment | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return {**json.loads(told[-1]), "log": done.stderr + done.stdout}


@pytest.mark.parametrize(("scenario", "model"), [("pressure", "llama"), ("drafts", "llama"), ("hybrid", "hybrid")])
def test_traffic_raises_nothing_and_is_seen(models: dict[str, Path], scenario: str, model: str) -> None:
    """Shared prefixes and chunked prefill; preemption and eviction, n-gram drafts, or groups over the same bytes."""
    seen = outcome(scenario, models[model])
    assert seen["incidents"] == []
    assert seen["errors"] == {}
    assert seen["state"] == "running"
    assert seen["verified"] >= 40_000
    assert seen["claims"] > 20
    assert seen["claims_not_covered"] == 0
    assert all(group["unknown"] == 0 and group["sealed"] > 0 for group in seen["groups"].values())


def test_the_small_cache_did_preempt(models: dict[str, Path]) -> None:
    assert outcome("pressure", models["llama"])["preempted"] > 5


@pytest.mark.parametrize(("scenario", "model"), [("pressure", "llama"), ("drafts", "llama"), ("hybrid", "hybrid")])
def test_tokens_are_the_same_with_the_canary_on_and_off(models: dict[str, Path], scenario: str, model: str) -> None:
    off = outcome(scenario, models[model], canary="off")
    assert off["hooked"] is False
    assert off["tokens"] == outcome(scenario, models[model])["tokens"]


def test_off_means_no_hook_and_nothing_imported(models: dict[str, Path]) -> None:
    assert outcome("pressure", models["llama"], canary="off")["loaded"] == ["kv_canary_vllm", "kv_canary_vllm.plugin"]


def test_a_hybrid_model_has_a_group_for_each_kind_of_layer(models: dict[str, Path]) -> None:
    groups = outcome("hybrid", models["hybrid"])["groups"]
    assert {name: (group["kind"], group["enabled"]) for name, group in groups.items()} == {
        "swa": ("swa", True),
        "full": ("full", True),
    }
    assert all(group["uncovered"] == [] for group in groups.values())


def test_a_flipped_bit_in_any_layer_of_a_hybrid_model_is_found_in_its_group(models: dict[str, Path]) -> None:
    found = outcome("hybrid_faults", models["hybrid"])["found"]
    assert len(found) == 4
    for one in found:
        assert [(i["check"], i["group"], i["page"], i["layers"]) for i in one["told"]] == [
            ("content", one["group"], one["page"], [one["layer"]])
        ]


def test_a_flipped_bit_is_found_on_its_page_and_layer(models: dict[str, Path]) -> None:
    """Every layer, the first and the last sealed page, the first and the last byte."""
    seen = outcome("faults", models["llama"])
    assert seen["clean"] == []
    assert len(seen["flips"]) == LAYERS * 2 * 2
    for flip in seen["flips"]:
        (incident,) = flip["told"]
        assert (incident["check"], incident["page"], incident["layers"], incident["persistence"]) == (
            "content",
            flip["page"],
            [flip["layer"]],
            "persistent",
        )


def test_the_incident_names_the_request_that_holds_the_page(models: dict[str, Path]) -> None:
    owned = outcome("faults", models["llama"])["owned"]
    (incident,) = owned["told"]
    assert (incident["owner"], incident["page"], incident["layers"]) == (
        owned["request"],
        owned["page"],
        [owned["layer"]],
    )


@pytest.mark.parametrize(("kind", "check"), [("forgotten", "free_page"), ("cached", "content")])
def test_a_late_write_into_a_freed_block_is_found(models: dict[str, Path], kind: str, check: str) -> None:
    (incident,) = outcome("faults", models["llama"])["late"][kind]
    assert incident["check"] == check


def test_a_prefix_hit_on_a_recycled_block_is_found(models: dict[str, Path]) -> None:
    incidents = outcome("faults", models["llama"])["phantom"]
    assert {incident["check"] for incident in incidents} == {"identity"}


def test_a_held_block_in_the_free_queue_is_found(models: dict[str, Path]) -> None:
    twice = outcome("faults", models["llama"])["twice"]
    assert [(i["check"], i["page"]) for i in twice["told"]][:1] == [("ownership", twice["page"])]


def test_after_the_faults_all_is_as_before(models: dict[str, Path]) -> None:
    seen = outcome("faults", models["llama"])
    assert seen["same_tokens"]
    assert seen["after"] == []
    assert seen["errors"] == {}


def test_a_bad_prefix_in_quarantine_is_computed_anew(models: dict[str, Path]) -> None:
    """Claimed, the bad block gives a wrong answer; in quarantine it is not claimed, though the engine was idle."""
    seen = outcome("quarantine", models["llama"])
    assert seen["right"][0] == seen["right"][1]
    assert seen["wrong"] != seen["right"][0]
    assert seen["answer"] == seen["right"][0]
    assert not seen["still_cached"]
    assert seen["asked"]
    assert {i["reaction"] for i in seen["done"]} <= {
        "quarantine: taken out of the prefix cache",
        "quarantine: the page was not in the prefix cache",
    }


def test_raise_fails_the_next_step_with_the_incident(models: dict[str, Path]) -> None:
    seen = outcome("raising", models["llama"], on_mismatch="raise")
    assert seen["error"] == "CanaryMismatchError"
    assert seen["incident"] in seen["message"]


def test_a_hook_that_throws_leaves_the_server_serving(models: dict[str, Path]) -> None:
    """In the scheduler and in a worker: same tokens, the group is off with its reason; switched on, it guards again."""
    seen = outcome("broken_hooks", models["llama"])
    assert all(tokens == seen["tokens"][0] for tokens in seen["tokens"])
    for (enabled, reason), half in zip(seen["reasons"], ("scheduler", "step"), strict=True):
        assert enabled is False
        assert half in reason
        assert "broken on purpose" in reason
    assert seen["errors"] == {"hook": 2}
    assert seen["enabled"]
    assert seen["recording"]
    assert seen["unknown"] == 0
    assert seen["incidents"] == []


def test_off_and_on_reset_and_sleep_under_load_raise_nothing(models: dict[str, Path]) -> None:
    seen = outcome("switches", models["llama"])
    assert seen["off"] == [False, False]  # neither half records
    assert seen["on"] == [True, True]
    assert seen["unknown"] == 0  # told anew from the scheduler's tables
    assert seen["reset"] is True
    assert seen["asleep"] == ["running", "suspended: the engine sleeps"]
    assert seen["half_awake"] == "suspended: the engine sleeps"  # the weights alone are back
    assert seen["awake"] == ["running", None, True]
    assert seen["incidents"] == []
    assert seen["errors"] == {}


def test_a_mode_that_is_not_modelled_is_off_with_its_reason(models: dict[str, Path], tmp_path: Path) -> None:
    link = tmp_path / "model"  # the connector of this scenario keeps files beside the model
    link.symlink_to(models["llama"])
    seen = outcome("connector", link)
    assert seen["enabled"] is False
    assert seen["reason"].startswith("the KV connector ExampleConnector moves pages on its own schedule")
    assert len(seen["uncovered"]) == LAYERS
    assert seen["incidents"] == 0


def test_a_vllm_that_does_not_fit_is_named_and_left_alone(models: dict[str, Path]) -> None:
    seen = outcome("misfit", models["llama"])
    assert (seen["answers"], seen["guarded"], seen["touched"]) == (2, False, False)
    lines = [line for line in seen["log"].splitlines() if "KV Canary is off" in line]
    assert len(lines) == 1
    assert "hook target KVCacheManager.pop_blocks_for_free does not exist" in lines[0]


def test_a_bad_setting_is_said_and_the_server_serves(models: dict[str, Path]) -> None:
    seen = outcome("bad_setting", models["llama"])
    assert (seen["answers"], seen["guarded"]) == (2, False)
    (line,) = [line for line in seen["log"].splitlines() if "KV Canary is off" in line]
    assert "KV_CANARY_BUDGET" in line
    assert "'a lot'" in line


def test_the_engine_core_in_a_process_of_its_own_is_guarded_there(models: dict[str, Path]) -> None:
    seen = outcome("processes", models["llama"])
    assert seen["clean"]["incidents"] == []
    assert seen["clean"]["verified"] >= 20_000
    assert seen["clean"]["claims"] > 10
    for one in seen["found"]:
        assert [(i["check"], i["page"], i["layers"]) for i in one["told"]] == [("content", one["page"], [one["layer"]])]
