"""The README's table "in-tree canary and KV Canary": what can be held by a test, on the same real pools."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kv_canary.fingerprint.backends import open_table
from kv_canary.ledger.base import OwnerNames
from kv_canary.registry import attach_canary_groups
from kv_canary.settings import Settings
from kv_canary.slot_chain import SlotChain
from kv_canary.verifier import Verifier
from kv_canary_sglang.allocators import AllocatorSpace
from kv_canary_sglang.order import EventOrder

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of SGLang's imports
    from sglang.srt.kv_canary.config import CanaryConfig, CanaryMode, RealKvHashMode
    from sglang.srt.kv_canary.pool_patcher import api
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("published")]

CPU = torch.device("cpu")
SIZE, LAYERS = 256, 32
SHAPE = {"layer_num": LAYERS, "device": "cpu", "enable_memory_saver": False}


def dense_pool(page: int = 1) -> Any:
    """The rows of an 8B Llama: 8 KV heads x 128, bf16."""
    return MHATokenToKVPool(size=SIZE, page_size=page, dtype=torch.bfloat16, head_num=8, head_dim=128, **SHAPE)


def in_tree(pool: Any, mode: RealKvHashMode = RealKvHashMode.ALL) -> Any:
    config = CanaryConfig(
        mode=CanaryMode.LOG,
        ring_capacity=16,
        sweep_interval=1,
        real_kv_hash_mode=mode,
        enable_write_input_assert=False,
        enable_verify_token_assert=False,
        stats_print_every_n_steps=0,
    )
    return api.attach_canary_buffers(pool=pool, config=config, device=CPU, kv_token_id_vs_position_offset=0)


def bytes_a_slot(page: int) -> float:
    """Ours: fingerprints, baseline, ledger and the hash beside every slot."""
    (group,) = attach_canary_groups(pool=dense_pool(page), settings=Settings(enabled=True), device=CPU)
    allocator = SimpleNamespace(page_size=page, size=SIZE)
    space = AllocatorSpace("slots", allocator, EventOrder(CPU, None), OwnerNames())
    verifier = Verifier(group, space.ledger, open_table(group), watch=lambda: 0, monotonic=lambda: 0.0)
    chain = SlotChain(space.pages * page, CPU)
    return (verifier.nbytes + space.ledger.nbytes + chain.state.nbytes) / (space.pages * page)


def test_the_in_tree_canary_reads_layer_0_and_ours_every_layer() -> None:
    pool = dense_pool()
    (theirs,) = in_tree(pool)
    sources = (*theirs.real_kv_sources_k, *theirs.real_kv_sources_v)
    row = 8 * 128 * 2
    assert [source.num_bytes_per_token for source in sources] == [row, row]  # K and V of one layer
    (ours,) = attach_canary_groups(pool=dense_pool(), settings=Settings(enabled=True), device=CPU)
    assert ours.bytes_per_page == 2 * LAYERS * row


def test_the_in_tree_canary_knows_four_classes_and_no_subclass() -> None:
    assert sorted(one.__name__ for one in api._POOL_ATTACHERS) == [
        "DeepSeekV4TokenToKVPool",
        "MHATokenToKVPool",
        "MHATokenToKVPoolFP4",
        "SWAKVPool",
    ]
    latent = {
        "size": SIZE,
        "page_size": 1,
        "dtype": torch.bfloat16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        **SHAPE,
    }
    with pytest.raises(NotImplementedError):
        in_tree(MLATokenToKVPool(**latent))
    assert attach_canary_groups(pool=MLATokenToKVPool(**latent), settings=Settings(enabled=True), device=CPU)


def test_memory_a_slot() -> None:
    """README: 128 bytes, and about 170 at page size 1, 46 at page size 16."""
    (theirs,) = in_tree(dense_pool())
    stamps = (theirs.k_head, theirs.k_tail, theirs.v_head, theirs.v_tail)
    assert sum(stamp.nbytes for stamp in stamps) / len(theirs.k_head) == 128
    assert 150 < bytes_a_slot(1) < 250
    assert 40 < bytes_a_slot(16) < 50
