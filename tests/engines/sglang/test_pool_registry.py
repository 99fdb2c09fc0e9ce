"""SGLang's pools in the registry: who is found for a class, what is said about it, and what is left alone and why."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from engines.sglang import deepseek_v4_cases, pool_cases, unified_cases
from kv_canary import registry
from kv_canary.errors import UnsupportedPoolError
from kv_canary.fingerprint import spec
from kv_canary.geometry import CanaryGroup
from kv_canary.registry import attach_canary_groups, find_attacher, register_pool_attacher, supported_pools
from kv_canary.settings import Settings
from kv_canary_sglang import pools
from kv_canary_sglang.pools import refused, spaces
from kv_canary_sglang.pools.catalog import ATTACHERS
from kv_canary_sglang.pools.hisparse import RECYCLED

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("published"),
]


@pytest.fixture(autouse=True)
def own_registry(published: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test may register what it likes."""
    monkeypatch.setattr(registry, "_attachers", dict(registry._attachers))


def attach(pool: Any, *, coverage: Any = "all", **options: Any) -> dict[str, CanaryGroup]:
    groups = attach_canary_groups(
        pool=pool, settings=Settings(coverage=coverage), device=torch.device("cpu"), **options
    )
    return {group.name: group for group in groups}


def reasons(group: CanaryGroup) -> set[str]:
    return {one.reason for one in group.uncovered}


# -- lookup


def test_every_name_of_the_catalog_is_a_class_of_this_sglang() -> None:
    """The Ascend backend needs a package that is not here; its classes are looked for in its source."""
    from importlib import import_module
    from importlib.util import find_spec

    for dotted in ATTACHERS:
        module, _, name = dotted.rpartition(".")
        if ".npu." in module:
            found = find_spec(module)
            assert found is not None
            assert found.origin is not None
            with open(found.origin) as source:
                assert f"\nclass {name}(" in source.read(), dotted
        else:
            assert isinstance(getattr(import_module(module), name), type), dotted


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("memory_pool.MHATokenToKVPoolFP4", "memory_pool.MHATokenToKVPool"),
        ("memory_pool.MHATokenToKVPoolMXFP8", "memory_pool.MHATokenToKVPool"),
        ("memory_pool.MLATokenToKVPoolFP4", "memory_pool.MLATokenToKVPool"),
        ("memory_pool.NoOpMHATokenToKVPool", "memory_pool.NoOpMHATokenToKVPool"),
        ("unified_memory_pool.UnifiedMHATokenToKVPool", "memory_pool.MHATokenToKVPool"),
        ("unified_memory_pool.UnifiedMLATokenToKVPool", "memory_pool.MLATokenToKVPool"),
        ("unified_memory_pool.UnifiedMambaPool", "memory_pool.MambaPool"),
        ("unified_memory_pool.UnifiedSWAKVPool", "swa_memory_pool.SWAKVPool"),
        ("unified_memory_pool.UnifiedHybridLinearKVPool", "memory_pool.HybridLinearKVPool"),
        ("unified_draft_pool.UnifiedDraftSWAKVPool", "swa_memory_pool.SWAKVPool"),
        ("minimax_m3_nvfp4_pool.MiniMaxM3Nvfp4KVPool", "memory_pool.MiniMaxSparseKVPool"),
        ("page_interleave_pool.PageInterleaveDSATokenToKVPool", "page_interleave_pool.PageInterleaveKVPoolMixin"),
        ("page_interleave_pool.PageInterleaveMHATokenToKVPool", "page_interleave_pool.PageInterleaveKVPoolMixin"),
        ("hisparse_memory_pool.HiSparseDSATokenToKVPool", "hisparse_memory_pool.HiSparseDSATokenToKVPool"),
    ],
)
def test_a_subclass_has_the_attacher_of_its_nearest_ancestor(path: str, nearest: str) -> None:
    from importlib import import_module

    module, _, name = f"sglang.srt.mem_cache.{path}".rpartition(".")
    assert find_attacher(getattr(import_module(module), name))[0] == f"sglang.srt.mem_cache.{nearest}"


def test_an_unknown_pool_is_named_with_what_is_supported() -> None:
    class Unknown: ...

    with pytest.raises(UnsupportedPoolError) as caught:
        attach(Unknown())
    assert "Unknown" in str(caught.value)
    assert all(name in str(caught.value) for name in ATTACHERS)


@pytest.mark.parametrize("wrapper", ["window", "hybrid", "minimax"])
def test_an_unknown_pool_inside_another_is_named(wrapper: str) -> None:
    class Unknown: ...

    stranger: Any = Unknown()
    stranger.model_layer_ids = (0, 1, 2)
    pool, attribute = {
        "window": (pool_cases.build_window, "swa_kv_pool"),
        "hybrid": (pool_cases.build_hybrid, "full_kv_pool"),
        "minimax": (pool_cases.build_minimax, "index_kv_pool"),
    }[wrapper]
    whole = pool()
    setattr(whole, attribute, stranger)
    with pytest.raises(UnsupportedPoolError) as caught:
        attach(whole)
    assert caught.value.pool_class.endswith("Unknown")


def test_registering_twice_changes_nothing() -> None:
    before = supported_pools()
    pools.register()
    assert supported_pools() == before


def test_an_attacher_of_the_users_own_stays_and_is_used_inside_wrappers_too() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    asked: list[Any] = []

    def own(pool: Any, **_: Any) -> tuple[CanaryGroup, ...]:
        asked.append(pool)
        return ()

    register_pool_attacher(MHATokenToKVPool, own)
    pools.register()
    pool = pool_cases.build_window()
    assert attach(pool) == {}
    assert asked == [pool.full_kv_pool, pool.swa_kv_pool]


# -- what is said about a pool


def test_attaching_writes_one_line_that_says_what_is_guarded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kv_canary"):
        attach(pool_cases.build_window(), kv_token_id_vs_position_offset=1)
    (record,) = [one for one in caplog.records if one.name == "kv_canary"]
    assert record.getMessage() == (
        "attached pool sglang.srt.mem_cache.swa_memory_pool.SWAKVPool with "
        "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool: coverage all, groups full,swa, kinds full,swa, 10 buffers, "
        f"{10 * 16 * 256} bytes a page, fingerprint memory {8 * (5 + 3)} bytes, offset 1"
    )


@pytest.mark.parametrize("offset", [0, 1])
def test_every_group_carries_the_offset(offset: int) -> None:
    for pool in (pool_cases.build_window(), pool_cases.build_hybrid(), pool_cases.build_dsa()):
        groups = attach(pool, kv_token_id_vs_position_offset=offset)
        assert len(groups) == 2
        assert {group.kv_token_id_vs_position_offset for group in groups.values()} == {offset}


# -- coverage


@pytest.mark.parametrize("kind", ["full", "mla"])
def test_coverage_partial_holds_the_first_16_bytes_of_every_token(kind: str) -> None:
    pool = pool_cases.build_mha() if kind == "full" else pool_cases.build_mla()
    group = attach(pool, coverage="partial")[kind]
    tensors = {"full": ("k", "k_buffer"), "mla": ("kv", "kv_buffer")}[kind]
    for tensor in getattr(pool, tensors[1]):
        tensor.view(torch.uint8).random_(0, 256)
    for layer in range(2):
        (buffer,) = [one for one in group.buffers if one.name == f"layers.{layer}.{tensors[0]}"]
        rows = getattr(pool, tensors[1])[layer][32:48].flatten(1).view(torch.uint8)[:, :16]
        assert spec.read_page(buffer, 2) == rows.contiguous().numpy().tobytes()
    assert {one.name for one in group.uncovered} == {one.name for one in group.buffers}


@pytest.mark.parametrize("kind", ["full", "mla"])
def test_coverage_none_lists_every_buffer_and_reads_none(kind: str) -> None:
    pool = pool_cases.build_mha() if kind == "full" else pool_cases.build_mla()
    everything = attach(pool)[kind]
    group = attach(pool, coverage="none")[kind]
    assert (group.buffers, group.pages) == ((), everything.pages)
    assert {one.name for one in group.uncovered} == {one.name for one in everything.buffers}


# -- what cannot be guarded


def test_a_pool_without_keys_and_values_is_left_alone() -> None:
    group = attach(pool_cases.build_mha(cls="NoOpMHATokenToKVPool"))["full"]
    assert (group.unguarded, group.buffers) == (refused.EMPTY, ())


def test_hisparse_guards_its_index_keys_over_all_logical_pages_and_none_of_its_device_slots() -> None:
    groups = attach(pool_cases.build_recycled_dsa())
    assert groups["mla"].unguarded == RECYCLED
    assert groups["indexer"].unguarded is None
    assert groups["indexer"].pages == 2 * 256 // 64 + 1  # twice the device's slots
    minimax = attach(pool_cases.build_recycled_minimax())
    assert {one.layer for one in minimax["full"].buffers} == {0}
    assert RECYCLED in reasons(minimax["full"])


def test_layers_of_another_rank_are_not_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.dsa_cache_layer_split import LayerSplitDSATokenToKVPool

    pool: Any = object.__new__(LayerSplitDSATokenToKVPool)
    pool.size, pool.page_size, pool.kv_buffer = 256, 64, [torch.zeros(320, 1, 576), torch.zeros(0, 1, 576)]
    pool.index_key_cache = SimpleNamespace(buffer=[torch.zeros(5, 8448), torch.zeros(0, 8448)])
    group = attach(pool)["mla"]
    assert group.unguarded == refused.LAYER_SPLIT
    assert {one.name for one in group.uncovered} == {"kv_buffer.0", "index_k_with_scale_buffer.0"}


def test_pages_that_are_spread_over_ranks_are_not_guarded() -> None:
    from sglang.srt.mem_cache.page_interleave_pool import PageInterleaveMHATokenToKVPool

    with patch.object(PageInterleaveMHATokenToKVPool, "_init_page_shard_state"):
        pool = PageInterleaveMHATokenToKVPool(
            size=64,
            page_size=16,
            dtype=torch.bfloat16,
            head_num=2,
            head_dim=64,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
            shard_spec=None,
            shard_group=None,
        )
    group = attach(pool)["full"]
    assert (group.unguarded, len(group.uncovered)) == (refused.INTERLEAVED, 4)


@pytest.fixture
def context_parallel() -> Iterator[None]:
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(attn_dcp_size=2, dcp_enabled=True):
        yield


@pytest.mark.parametrize("build", [pool_cases.build_mha, pool_cases.build_mla, pool_cases.build_window])
def test_slots_that_are_spread_over_ranks_are_not_guarded(build: Any, context_parallel: None) -> None:
    for group in attach(build()).values():
        assert group.unguarded == spaces.CONTEXT_PARALLEL
        assert group.uncovered


def test_a_draft_pool_that_every_rank_has_whole_is_guarded(context_parallel: None) -> None:
    pool = pool_cases.build_mla(dcp_replicated=True)
    assert attach(pool)["mla"].unguarded is None


def test_a_pool_is_not_read_before_its_memory_is_backed_nor_beyond() -> None:
    pool = pool_cases.build_mha()
    pool._post_capture_owner = SimpleNamespace(_final_num_tokens=None, close=lambda: None)
    assert attach(pool)["full"].unguarded == spaces.NOT_BACKED
    pool._post_capture_owner._final_num_tokens = pool.size = 32
    assert attach(pool)["full"].pages == 3


def test_rings_of_deepseek_v4_are_listed_with_the_reason() -> None:
    from kv_canary_sglang.pools import deepseek_v4

    groups = attach(deepseek_v4_cases.build_v4())
    states = {one.name for one in groups["mla"].uncovered if one.reason == deepseek_v4.STATE}
    assert states == {
        *(f"layers.{layer}.compress_state" for layer in (1, 2, 3)),
        *(f"layers.{layer}.index_compress_state" for layer in (1, 3)),
    }
    ring = attach(deepseek_v4_cases.build_one_tensor_a_layer(fp8=False))["swa"]
    assert ring.unguarded == deepseek_v4.RING


def test_a_model_of_window_layers_alone_has_no_full_group() -> None:
    pool = pool_cases.build_window(full_attention_layer_ids=[], swa_attention_layer_ids=[0, 1])
    assert set(attach(pool)) == {"swa"}


def test_pages_of_unified_memory_are_the_sub_pools_physical_ones() -> None:
    pool = unified_cases.build_window()
    groups = attach(pool)
    memory = pool.unified_buffer
    assert groups["full"].pages == memory.max_slots("full") // unified_cases.TOKENS
    assert groups["swa"].pages == memory.max_slots("swa") // unified_cases.TOKENS
    assert groups["swa"].pages != groups["full"].pages


# -- whose pages they are


def allocator_pages(allocator: Any) -> int:
    """The padding page, and what the free list holds at the start."""
    return allocator.available_size() // allocator.page_size + 1


def test_pages_of_window_pools_are_those_of_the_two_allocators() -> None:
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

    v4 = deepseek_v4_cases.build_v4()
    made = SWATokenToKVPoolAllocator(
        deepseek_v4_cases.FULL, deepseek_v4_cases.WINDOW, deepseek_v4_cases.TOKENS, v4.dtype, "cpu", v4, False
    )
    windowed = pool_cases.build_window()
    for pool, allocator in ((v4, made), (windowed, windowed.allocator)):
        for group in attach(pool).values():
            inner = allocator.swa_attn_allocator if group.kind == "swa" else allocator.full_attn_allocator
            assert group.pages == allocator_pages(inner)
            assert group.page_tokens == inner.page_size


def test_pages_of_hisparse_index_keys_are_those_of_the_logical_allocator() -> None:
    from sglang.srt.mem_cache.allocator.hisparse import HiSparseTokenToKVPoolAllocator

    pool = pool_cases.build_recycled_dsa()
    allocator = HiSparseTokenToKVPoolAllocator(256, 64, torch.bfloat16, torch.device("cpu"), pool, False)
    groups = attach(pool)
    assert groups["indexer"].pages == allocator_pages(allocator.logical_attn_allocator)
    assert "full_to_hisparse_device_index_mapping" in {one.name for one in groups["mla"].uncovered}
