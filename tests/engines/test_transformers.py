"""The transformers adapter on a real continuous-batching engine: silent when all is right, loud when it is not."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers

from builders.transformers_engine import (
    collect,
    generate,
    guarded_engine,
    make_settings,
    paused,
    prompts_sharing_prefixes,
    real_incidents,
    wait_until,
)
from kv_canary import CanaryMismatchError, UnsupportedEngineError
from kv_canary.commands import RequestDrill, SetEnabled
from kv_canary_transformers import attach
from kv_canary_transformers.demo.engine import build_manager, build_model
from kv_canary_transformers.demo.traffic import Traffic

pytestmark = pytest.mark.engines


def allocator_of(manager: Any) -> Any:
    return manager.batch_processor.cache.cache_allocators["full_attention"]


def counters(sidecar: Any) -> Any:
    return sidecar.snapshot().groups[0].counters


def test_traffic_of_every_kind_under_pressure_raises_nothing() -> None:
    """Shared prefixes, forks, cancels, chunked prefill, de-duplication and eviction, on a pool that is always too
    small.
    """
    with guarded_engine(pages=48, batch_tokens=96) as (manager, sidecar):
        traffic = Traffic(manager, pages=48, seed=1)
        wait_until(lambda: traffic.pump() or (traffic.requests_cancelled > 3 and traffic.requests_finished > 150), 120)
        snapshot = sidecar.settle()
    assert real_incidents(snapshot) == []
    assert snapshot.errors == {}
    seen = snapshot.groups[0].counters
    assert seen.verified_pages > 20_000
    assert seen.claims > 50
    assert seen.claims_not_covered == 0
    assert seen.sealed_pages > 200
    assert snapshot.groups[0].pages["unknown"] == 0


def test_prefix_hits_are_claims_with_a_known_identity() -> None:
    with guarded_engine() as (manager, sidecar):
        generate(manager, prompts_sharing_prefixes(3))
        before = sidecar.settle().groups[0].counters.claims
        generate(manager, prompts_sharing_prefixes(3))
        after = sidecar.settle().groups[0].counters
    assert after.claims - before >= 3 * (48 // 16)
    assert after.claims_not_covered == 0


def test_tokens_are_the_same_with_the_canary_on_off_and_drilled() -> None:
    """The same prompts queued before the start give the same schedule, and so the same tokens, in float32."""
    prompts = prompts_sharing_prefixes(12)
    answers = {}
    for mode in ("off", "on", "drilled"):
        with guarded_engine(guarded=mode != "off", started=False) as (manager, sidecar):
            for index, prompt in enumerate(prompts):
                manager.add_request(prompt, request_id=f"r{index}", max_new_tokens=32)
            manager.start()
            if mode == "drilled":
                wait_until(lambda s=sidecar: s.snapshot().groups and counters(s).verified_pages)
                for _ in range(5):
                    sidecar.submit(RequestDrill(kind="fingerprint")).result(5)
            answers[mode] = collect(manager, len(prompts))
            if mode == "drilled":
                assert sidecar.settle().drills_total[("fingerprint", "detected")] >= 5
    assert answers["on"] == answers["off"]
    assert answers["drilled"] == answers["off"]


@pytest.mark.parametrize("share", [True, False])
def test_forks_share_or_copy_blocks_and_raise_nothing(share: bool) -> None:
    with guarded_engine(allow_block_sharing=share) as (manager, sidecar):
        manager.num_return_sequences = 3
        answers = generate(manager, prompts_sharing_prefixes(4), new_tokens=40)
        snapshot = sidecar.settle()
    assert len(answers) == 12
    assert real_incidents(snapshot) == []
    assert snapshot.groups[0].counters.sealed_pages > 0


@pytest.mark.parametrize("share", [True, False])
def test_every_complete_block_of_every_request_is_guarded(share: bool) -> None:
    """An audit in the middle of traffic: complete blocks have a valid fingerprint, and no others have one."""
    with guarded_engine(pages=64, allow_block_sharing=share) as (manager, sidecar):
        traffic = Traffic(manager, pages=64, seed=5)
        audited = 0
        for round_ in range(10):
            wait_until(lambda n=round_: traffic.pump() or traffic.requests_finished > n * 10, 60)
            with paused(manager):
                sidecar.settle()
                allocator, verifier = allocator_of(manager), sidecar._canary._guards[0].verifier
                for request_id, state in manager.batch_processor.scheduler.active_requests.items():
                    table = allocator.block_table.get(request_id, [])
                    complete = state.position_offset // allocator.tokens_per_page
                    assert all(verifier.is_valid(block) for block in table[:complete]), request_id
                    assert not any(verifier.is_valid(block) for block in table[complete:]), request_id
                    audited += complete
    assert audited > 100
    assert real_incidents(sidecar.snapshot()) == []


@pytest.mark.parametrize("kind", ["fingerprint", "content"])
def test_drills_are_detected_while_it_serves(kind: str) -> None:
    """The incident names page, stripe, layer, window and owner; after a content drill the byte is back."""
    with guarded_engine() as (manager, sidecar):
        generate(manager, prompts_sharing_prefixes(6))
        sidecar.settle()
        cache = manager.batch_processor.cache.cache_tensor
        before = cache.clone()
        drill = sidecar.submit(RequestDrill(kind=kind)).result(5)
        wait_until(lambda: next(d for d in sidecar.snapshot().drills if d.id == drill.id).result != "running", 5)
        done = next(d for d in sidecar.snapshot().drills if d.id == drill.id)
        assert done.result == "detected"
        assert done.seconds < 5
        incident = next(i for i in sidecar.snapshot().incidents if i.id == done.incident)
        assert torch.equal(cache, before)
        snapshot = sidecar.settle()
    assert incident.page == done.page
    assert [finding.stripe for finding in incident.stripes] == [done.stripe]
    assert len(incident.layers) >= 1
    assert incident.last_good_at < incident.found_at
    assert incident.owner or incident.previous_owner or incident.check == "free_page"
    assert real_incidents(snapshot) == []


def test_one_flipped_bit_in_any_layer_is_found_on_its_page() -> None:
    with guarded_engine(model=build_model(head_dim=64)) as (manager, sidecar):  # a layer is large enough for a stripe
        generate(manager, prompts_sharing_prefixes(8))
        with paused(manager):
            sidecar.settle()
            allocator = allocator_of(manager)
            blocks = list(allocator.ledger.cached_blocks)[:8]
            for index, block in enumerate(blocks):
                layer = index % 4
                offset = layer * allocator.bytes_per_page + 37 * (index + 1)
                allocator._copy_view[block, offset] ^= 1 << (index % 8)
                wait_until(lambda n=index: len(real_incidents(sidecar.snapshot())) == n + 1)
                incident = real_incidents(sidecar.snapshot())[-1]
                assert (incident.page, incident.layers, incident.check) == (block, (layer,), "content")
                assert incident.previous_owner.startswith("r")


def test_a_late_write_into_a_freed_block_is_found() -> None:
    with guarded_engine() as (manager, sidecar):
        generate(manager, prompts_sharing_prefixes(4))
        with paused(manager):
            sidecar.settle()
            allocator = allocator_of(manager)
            block = next(block for leaves in allocator.pool._free_blocks[0].trees.values() for block in leaves)
            allocator._copy_view[block, 5] ^= 4
            wait_until(lambda: real_incidents(sidecar.snapshot()))
            incident = real_incidents(sidecar.snapshot())[0]
    assert (incident.page, incident.check) == (block, "free_page")


def test_a_block_put_twice_into_the_free_list_is_found() -> None:
    """Two owners: caught when the pool hands the block out a second time."""
    with guarded_engine(pages=64) as (manager, sidecar):
        generate(manager, prompts_sharing_prefixes(2))
        with paused(manager):
            trees = allocator_of(manager).pool._free_blocks[0]
            if not any(trees.trees.values()):
                allocator_of(manager).pool.allocate_sector(0)
            root, leaves = next((root, leaves) for root, leaves in trees.trees.items() if leaves)
            trees.trees[root] = [*leaves, leaves[-1]]
            trees._length += 1
        manager.add_request([7] * 40, request_id="double", max_new_tokens=8)
        wait_until(lambda: any(i.check == "ownership" for i in real_incidents(sidecar.snapshot())))
        incident = next(i for i in real_incidents(sidecar.snapshot()) if i.check == "ownership")
    assert incident.cause == "two owners"
    assert incident.page == leaves[-1]


def test_a_prefix_hit_on_other_tokens_is_found_as_identity() -> None:
    """The hash map is made to point at a block that holds another prompt's tokens (a phantom hit)."""
    with guarded_engine() as (manager, sidecar):
        first, second = prompts_sharing_prefixes(2)
        generate(manager, [first, second])
        with paused(manager):
            sidecar.settle()
            ledger = allocator_of(manager).ledger
            ledger.hash_to_block = dict.fromkeys(ledger.hash_to_block, next(iter(ledger.hash_to_block.values())))
        generate(manager, [second])
        wait_until(lambda: any(i.check == "identity" for i in real_incidents(sidecar.snapshot())))


def test_quarantine_takes_the_block_out_of_the_prefix_cache() -> None:
    """After a flipped bit in a cached prefix the next request with it recomputes, and its tokens are right."""
    prompt = prompts_sharing_prefixes(1)[0]
    with guarded_engine(settings=make_settings(on_mismatch="quarantine")) as (manager, sidecar):
        right = generate(manager, [prompt])["r0"]
        with paused(manager):
            sidecar.settle()
            allocator = allocator_of(manager)
            block = next(iter(allocator.ledger.cached_blocks))
            allocator._copy_view[block, :256] ^= 0x55
            wait_until(lambda: real_incidents(sidecar.snapshot()))
        wait_until(lambda: "freed" in real_incidents(sidecar.snapshot())[0].reaction)
        assert block not in allocator.ledger.block_to_hash
        assert generate(manager, [prompt])["r0"] == right


def test_raise_stops_the_engine_at_its_next_step() -> None:
    with guarded_engine(settings=make_settings(on_mismatch="raise"), may_die=True) as (manager, sidecar):
        generate(manager, prompts_sharing_prefixes(2))
        with paused(manager):
            sidecar.settle()
            allocator_of(manager)._copy_view[next(iter(allocator_of(manager).ledger.cached_blocks)), 0] ^= 1
            wait_until(lambda: real_incidents(sidecar.snapshot()))
        wait_until(lambda: isinstance(manager.background_thread_status.fatal_error, CanaryMismatchError))


def test_a_hook_that_fails_leaves_the_engine_with_the_same_tokens(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """The group is off with its reason, counted, logged once; generation goes on as if there were no canary."""
    from kv_canary_transformers.recorder import Recorder

    prompts = prompts_sharing_prefixes(6)
    with guarded_engine(guarded=False) as (manager, _):
        right = generate(manager, prompts)

    def broken(*args: Any) -> None:
        raise ZeroDivisionError("made to fail")

    monkeypatch.setattr(Recorder, "completed", broken)
    with guarded_engine() as (manager, sidecar):
        answers = generate(manager, prompts)
        wait_until(lambda: not sidecar.snapshot().groups[0].enabled)
        snapshot = sidecar.settle()
    assert answers == right
    assert "made to fail" in snapshot.groups[0].disabled_reason
    assert snapshot.errors == {"hook": 1}
    assert sum("made to fail" in str(record.exc_info) for record in caplog.records) == 1


def test_switched_off_nothing_is_read_and_on_again_coverage_returns() -> None:
    with guarded_engine(pages=48) as (manager, sidecar):
        traffic = Traffic(manager, pages=48, seed=2)
        for _ in range(3):
            start = counters(sidecar).verified_pages if sidecar.snapshot().groups else 0
            wait_until(
                lambda n=start: (
                    traffic.pump() or (sidecar.snapshot().groups and counters(sidecar).verified_pages > n + 500)
                ),
                60,
            )
            sidecar.submit(SetEnabled(enabled=False)).result(5)
            read = dict(counters(sidecar).read_bytes)
            finished = traffic.requests_finished
            wait_until(lambda n=finished: traffic.pump() or traffic.requests_finished > n + 10, 60)
            assert dict(sidecar.settle().groups[0].counters.read_bytes) == read
            sidecar.submit(SetEnabled(enabled=True)).result(5)
        wait_until(lambda: traffic.pump() or sidecar.snapshot().groups[0].pages["unknown"] == 0)
        snapshot = sidecar.settle()
    assert real_incidents(snapshot) == []
    assert snapshot.errors == {}


def test_attached_late_it_adopts_what_is_there() -> None:
    """On a running, idle engine: sealed blocks are adopted from the engine's tables and guarded from then on."""
    with guarded_engine(guarded=False) as (manager, _):
        prompts = prompts_sharing_prefixes(4)
        first = generate(manager, prompts)
        sidecar = attach(manager, make_settings(), serve=False)
        try:
            wait_until(lambda: sidecar.snapshot().groups and sidecar.snapshot().groups[0].pages["sealed"] > 0)
            block = next(iter(allocator_of(manager).ledger.cached_blocks))
            wait_until(lambda: sidecar.snapshot().groups[0].pages["unknown"] == 0)
            assert generate(manager, prompts) == first
            with paused(manager):
                sidecar.settle()
                allocator_of(manager)._copy_view[block, 9] ^= 1
                wait_until(lambda: real_incidents(sidecar.snapshot()))
            assert [i.page for i in real_incidents(sidecar.snapshot())] == [block]
        finally:
            sidecar.detach()


def test_detach_restores_every_object() -> None:
    with guarded_engine(guarded=False) as (manager, _):
        generate(manager, prompts_sharing_prefixes(1))
        processor = manager.batch_processor
        objects = [manager, processor, processor.cache, processor.cache.pool, processor.inputs_and_outputs]
        objects += list(processor.cache.cache_allocators.values())
        before = [{name for name, value in vars(thing).items() if callable(value)} for thing in objects]
        sidecar = attach(manager, make_settings(), serve=False)
        wait_until(lambda: sidecar.snapshot().groups)
        assert [{name for name, value in vars(thing).items() if callable(value)} for thing in objects] != before
        sidecar.detach()
        assert [{name for name, value in vars(thing).items() if callable(value)} for thing in objects] == before
        assert not sidecar.is_alive
        generate(manager, prompts_sharing_prefixes(2))


def test_a_model_is_guarded_through_every_manager_it_makes() -> None:
    model = build_model()
    sidecar = attach(model, make_settings(), serve=False)
    try:
        for _ in range(2):
            manager = build_manager(model, pages=64)
            manager.start()
            generate(manager, prompts_sharing_prefixes(3))
            wait_until(lambda: sidecar.snapshot().groups and counters(sidecar).verified_pages > 0)
            manager.stop(block=True, timeout=30)
            wait_until(lambda: not sidecar.snapshot().groups)
        assert real_incidents(sidecar.snapshot()) == []
    finally:
        sidecar.detach()
    assert "init_continuous_batching" not in vars(model)


@pytest.mark.skipif(
    transformers.__version__.startswith("5.18."),
    reason="transformers 5.18 cannot run a second session of a kept manager with sdpa (wrong mask), canary or not",
)
def test_a_kept_manager_is_guarded_in_its_next_session() -> None:
    model = build_model()
    manager = build_manager(model, pages=64)
    sidecar = attach(manager, make_settings(), serve=False)
    try:
        for _ in range(3):
            manager.start()
            generate(manager, prompts_sharing_prefixes(3))
            manager.stop(block=True, timeout=30, keep_for_next_session=True)
        snapshot = sidecar.settle()
        assert real_incidents(snapshot) == []
        assert snapshot.errors == {}
        assert snapshot.groups[0].counters.sealed_pages > 0
    finally:
        sidecar.detach()
        model.destroy_cached_continuous_batching_manager()


def test_sliding_layers_are_listed_as_not_covered_and_raise_nothing() -> None:
    """A hybrid model: sectors travel between two allocators over the same bytes all the time."""
    model = build_model(num_hidden_layers=4, sliding_window=32, layer_types=["full_attention", "sliding_attention"] * 2)
    with guarded_engine(model=model, pages=48) as (manager, sidecar):
        traffic = Traffic(manager, pages=48, seed=3)
        wait_until(
            lambda: traffic.pump() or (traffic.requests_finished > 60 and counters(sidecar).verified_pages > 2000), 120
        )
        snapshot = sidecar.settle()
        groups = {group.name: group for group in snapshot.groups}
    assert set(groups) == {"full", "sliding"}
    assert groups["sliding"].uncovered[0].name == "sliding: blocks in use"
    assert groups["full"].counters.sealed_pages > 50
    assert real_incidents(snapshot) == []
    assert snapshot.errors == {}


def test_an_unsupported_version_is_refused_in_one_line_and_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = build_manager(build_model(), pages=64)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.17.0")
    before = dict(vars(manager))
    with pytest.raises(
        UnsupportedEngineError, match=r"transformers 5\.17\.0 is not supported; kv-canary supports 5\.18"
    ):
        attach(manager, make_settings(), serve=False)
    assert vars(manager) == before


def test_a_changed_engine_is_refused_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook target with another signature: one clear line, the engine serves unguarded."""
    from transformers.generation.continuous_batching.cache_allocators import CachePool

    monkeypatch.setattr(CachePool, "free_blocks", lambda self, renamed: None)
    manager = build_manager(build_model(), pages=64)
    sidecar = attach(manager, make_settings(), serve=False)
    try:
        manager.start()
        wait_until(lambda: sidecar.snapshot().errors.get("hook") == 1)
        assert "CachePool.free_blocks takes (renamed)" in sidecar.snapshot().last_errors[0]
        assert sidecar.snapshot().groups == ()
        assert manager.is_running()
    finally:
        manager.stop(block=True, timeout=10, hard_stop=True)
        sidecar.detach()


def test_something_else_is_refused_with_what_is_wanted() -> None:
    with pytest.raises(UnsupportedEngineError, match="cannot attach to a dict"):
        attach({}, make_settings(), serve=False)
