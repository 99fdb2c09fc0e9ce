"""Where vLLM says that a page lies and where we look: the same bytes. Against vLLM's own views, without an engine."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kv_canary.fingerprint.backends import open_table
from kv_canary.registry import attach_canary_groups
from kv_canary.settings import Settings

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
BLOCKS, LAYERS, TOKENS = 7, 3, 16


def make_spec(kind: str) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    if kind == "mla":
        return MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=656, dtype=torch.uint8, head_size_v=0)
    if kind == "window":
        return SlidingWindowSpec(
            block_size=TOKENS, num_kv_heads=2, head_size=24, dtype=torch.bfloat16, sliding_window=64
        )
    padded = 8192 if kind == "padded" else None
    return FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=3, head_size=24, dtype=torch.bfloat16, page_size_padded=padded
    )


def make_pool(layout_name: str, kind: str) -> tuple[Any, list[torch.Tensor]]:
    """A worker's cache of one group in this layout, and vLLM's view of each layer: [block, head, token, content]."""
    from vllm.v1.kv_cache_interface import (
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        compute_layout_strides,
        create_kv_cache_views,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from kv_canary_vllm.worker import worker_cache

    spec, layout = make_spec(kind), KVCacheLayout[layout_name]
    strides = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
    names = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
    size = LAYERS * BLOCKS * spec.page_size_bytes
    placed = KVCacheTensor(size=size, layers=names, layer_stride=strides[0], block_stride=strides[1])
    raw = torch.randint(-128, 128, (size,), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    views = create_kv_cache_views(raw, spec, BLOCKS, layout, placed)
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[placed],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec)],
        kv_cache_layout=layout_name,
    )
    context = {name: SimpleNamespace(kv_cache=view) for name, view in zip(names, views, strict=True)}
    vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=LAYERS)),
    )
    return worker_cache(vllm_config, config, None), views


@pytest.mark.parametrize("kind", ["full", "mla", "window", "padded"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_changed_byte_of_a_page_changes_the_fingerprint_of_that_page_and_layer_alone(layout: str, kind: str) -> None:
    try:
        pool, views = make_pool(layout, kind)
    except AssertionError as error:
        assert kind == "padded"
        pytest.skip(f"vLLM has no such cache: {error}")
    settings = Settings()
    from kv_canary_vllm import geometry

    geometry.register()
    (group,) = attach_canary_groups(pool=pool, settings=settings, device=torch.device("cpu"))
    assert [buffer.bytes_per_page for buffer in group.buffers] == [views[0][0].nbytes] * LAYERS
    table = open_table(group)
    pages = np.arange(BLOCKS)
    stripe_of = {buffer.layer: number for number, stripe in enumerate(group.stripes) for buffer in stripe.buffers}
    before = table.read(pages).copy()
    _, heads, tokens, _ = views[0].shape
    for layer, view in enumerate(views):
        for page, head, token, end in ((1, 0, 0, 0), (BLOCKS - 1, heads - 1, tokens - 1, -1), (3, heads - 1, 0, -1)):
            cell = view[page, head, token].view(torch.uint8)
            cell[end] ^= 1
            changed = np.argwhere(table.read(pages) != before).tolist()
            cell[end] ^= 1
            assert changed == [[page, stripe_of[layer]]]
    assert (table.read(pages) == before).all()


def test_block_0_is_never_guarded() -> None:
    from kv_canary_vllm import geometry

    geometry.register()
    pool, _ = make_pool("LBHNC", "full")
    (group,) = attach_canary_groups(pool=pool, settings=Settings(), device=torch.device("cpu"))
    assert group.first_page == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens_per_state": Fraction(1, 2)}, "tokens a state"),
        ({}, None),
    ],
)
def test_what_is_not_modelled_has_its_reason(change: dict[str, Any], reason: str | None) -> None:
    from dataclasses import replace

    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    from kv_canary_vllm.modes import group_mode

    mode = group_mode(KVCacheGroupSpec(layer_names=["a"], kv_cache_spec=replace(make_spec("full"), **change)))
    assert (mode.unguarded is None) == (reason is None)
    assert reason is None or reason in str(mode.unguarded)


@pytest.mark.parametrize(("mode", "guarded"), [("none", True), ("align", False), ("all", False)])
def test_states_are_guarded_while_free_unless_they_move(mode: str, guarded: bool) -> None:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec

    from kv_canary_vllm.modes import group_mode

    spec = MambaSpec(block_size=TOKENS, shapes=((4, 8),), dtypes=(torch.float32,), mamba_cache_mode=mode)
    found = group_mode(KVCacheGroupSpec(layer_names=["a"], kv_cache_spec=spec))
    assert (found.kind, found.sealed, found.unguarded is None) == ("state", False, guarded)
