"""SGLang's real pools, built small on a CPU: each with the pool's own views of a page and its own door for writes.

A view is taken from the tensors of the pool by SGLang's own indexing (slot // page size, page row, layer of a list), so
that a test does not ask the code under test where a page lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

View = Callable[[int], torch.Tensor]  # page -> a piece of the pool's own tensor
Views = dict[tuple[str, str], View]  # (group, buffer) -> view

TOKENS, SLOTS = 16, 64  # of a page and of a pool, where a case says nothing else
HEADS, WIDTH = 2, 64
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def publish_server_args(folder: Path) -> None:
    """SGLang's pools read the configuration of the process: that of a server of a tiny model."""
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    arguments = ServerArgs(model_path=str(folder), device="cpu", load_format="dummy", skip_tokenizer_init=True)
    publish(arguments, role="scheduler")


@dataclass(frozen=True, kw_only=True)
class Case:
    """`write(pool, group, slots)` writes whole tokens of all layers through SGLang's own methods; None if they need a
    GPU: such a case is filled through its tensors.

    `listed` are tensors (by the end of their path in the pool) that are not guarded, with the name they are listed
    under. `raw` are tensors that other tensors are views of; between the views there may be gaps.
    `foreign` are those of another pool. `pages` is how many a group has where its tensors are longer than that.
    """

    name: str
    build: Callable[[], Any]
    views: Callable[[Any], Views]
    write: Callable[[Any, str, torch.Tensor], None] | None = None
    listed: Mapping[str, str] = field(default_factory=dict)
    raw: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    first_page: Mapping[str, int] = field(default_factory=dict)
    pages: Mapping[str, int] = field(default_factory=dict)
    shares_bytes: bool = False


def by_slot(tensor: torch.Tensor, tokens: int) -> View:
    return lambda page: tensor[page * tokens : (page + 1) * tokens]


def by_page(tensor: torch.Tensor) -> View:
    return lambda page: tensor[page]


def random_rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def layer(number: int) -> Any:
    return SimpleNamespace(layer_id=number, is_cross_attention=False)


@contextmanager
def interpreted(module: Any, *kernels: str) -> Iterator[None]:
    """Triton kernels of a module of SGLang, run by Triton's interpreter: they work without a GPU."""
    from triton.runtime.interpreter import InterpretedFunction

    kept = {name: getattr(module, name) for name in kernels}
    for name, kernel in kept.items():
        setattr(module, name, InterpretedFunction(kernel.fn))
    try:
        yield
    finally:
        for name, kernel in kept.items():
            setattr(module, name, kernel)


# -- keys and values by slot


def build_mha(dtype: torch.dtype = torch.bfloat16, cls: str = "MHATokenToKVPool", **overrides: Any) -> Any:
    from sglang.srt.mem_cache import memory_pool

    values = {"size": SLOTS, "page_size": TOKENS, "layer_num": 2, "head_num": HEADS, "head_dim": WIDTH} | overrides
    return getattr(memory_pool, cls)(dtype=dtype, device="cpu", enable_memory_saver=False, **values)


def build_heads_first(**overrides: Any) -> Any:
    from sglang.srt.environ import envs

    with envs.SGLANG_USE_HND_KVCACHE.override(True):
        return build_mha(**overrides)


def build_five_dimensions() -> Any:
    """ROCm's layout for AITER: K in vectors of 16 bytes, V transposed in them."""
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache import memory_pool

    with (
        patch.object(memory_pool, "_use_aiter", True),
        envs.SGLANG_AITER_KV_CACHE_LAYOUT.override("vectorized_5d"),
    ):
        return build_mha()


def dense_views(
    pool: Any, group: str = "full", layers: Sequence[int] | None = None, *, paged: Iterable[str] = ()
) -> Views:
    """K and V and what belongs to them. `paged` attributes are indexed by pages, the others by slots."""
    views: Views = {}
    numbers = range(pool.start_layer, pool.start_layer + pool.layer_num) if layers is None else layers
    for part, attribute in (
        *(("k", "k_buffer"), ("v", "v_buffer"), ("k_scale", "k_scale_buffer"), ("v_scale", "v_scale_buffer")),
        *(("native_k_scale", "native_k_scale_buffer"), ("native_v_scale", "native_v_scale_buffer")),
    ):
        tensors = getattr(pool, attribute, None)
        for index, number in enumerate(numbers if tensors is not None else ()):
            view = by_page(tensors[index]) if attribute in paged else by_slot(tensors[index], pool.page_size)
            views[group, f"layers.{number}.{part}"] = view
    return views


def write_dense(pool: Any, group: str, slots: torch.Tensor) -> None:
    for number in range(pool.start_layer, pool.start_layer + pool.layer_num):
        k = random_rows(len(slots), pool.head_num, pool.head_dim)
        v = random_rows(len(slots), pool.head_num, pool.v_head_dim)
        pool.set_kv_buffer(layer(number), slots, k, v)


def build_quantised(method: str, **options: Any) -> Any:
    from sglang.srt.layers.quantization import fp4_kv_cache_quant_method as methods

    return build_mha(
        torch.float4_e2m1fn_x2 if "FP4" in method else torch.float8_e4m3fn,
        quant_method=getattr(methods, method)(**options),
    )


def dense_cases() -> Iterator[Case]:
    for tokens in (1, 4, TOKENS):
        yield Case(
            name=f"MHA, page size {tokens}",
            build=lambda tokens=tokens: build_mha(page_size=tokens),
            views=dense_views,
            write=write_dense,
        )
    yield Case(
        name="MHA, values narrower than keys, second stage of a pipeline",
        build=lambda: build_mha(v_head_dim=24, start_layer=5, end_layer=6),
        views=dense_views,
        write=write_dense,
    )
    yield Case(name="MHA, fp8", build=lambda: build_mha(torch.float8_e4m3fn), views=dense_views, write=write_dense)
    yield Case(
        name="MHA, heads first",
        build=build_heads_first,
        views=lambda pool: dense_views(pool, paged=("k_buffer", "v_buffer")),
        write=write_dense,
    )
    yield Case(
        name="MHA, five dimensions",
        build=build_five_dimensions,
        views=lambda pool: dense_views(pool, paged=("k_buffer", "v_buffer")),
    )
    yield Case(
        name="MHA FP4",
        build=lambda: build_mha(torch.float4_e2m1fn_x2, "MHATokenToKVPoolFP4"),
        views=dense_views,
        write=write_dense,
    )
    yield Case(
        name="MHA MXFP8",
        build=lambda: build_mha(torch.float8_e4m3fn, "MHATokenToKVPoolMXFP8"),
        views=dense_views,
    )
    yield Case(
        name="MHA MXFP8, interleaved scales",
        build=lambda: build_mha(torch.float8_e4m3fn, "MHATokenToKVPoolMXFP8", page_size=128, size=256, head_dim=128),
        views=lambda pool: dense_views(pool, paged=("k_scale_buffer", "v_scale_buffer")),
    )
    workspace = {"dq_k_buffer": "dq_k_buffer", "dq_v_buffer": "dq_v_buffer"}
    for native in (False, True):
        yield Case(
            name=f"MHA NVFP4, {'native' if native else 'linear'} scales",
            build=lambda native=native: build_quantised(
                "NVFP4KVCacheMethod", num_layers=2, device="cpu", page_size=TOKENS, native_scale_layout=native
            ),
            views=lambda pool: dense_views(pool, paged=("native_k_scale_buffer", "native_v_scale_buffer")),
            listed=workspace,
        )
    yield Case(
        name="MHA FP4 in blocks of 16",
        build=lambda: build_quantised("FP4MXBlock16KVCacheMethod"),
        views=dense_views,
        write=write_dense,
        listed=workspace,
    )
    yield Case(
        name="MHA fp8 of the CPU backend",
        build=lambda: build_quantised("CPUFP8KVCacheMethod"),
        views=dense_views,
        write=write_dense,
    )


# -- latent rows


def build_mla(dtype: torch.dtype = torch.bfloat16, cls: str = "MLATokenToKVPool", **overrides: Any) -> Any:
    from sglang.srt.mem_cache import memory_pool

    values = {"size": SLOTS, "page_size": TOKENS, "layer_num": 2} | LATENT | overrides
    return getattr(memory_pool, cls)(dtype=dtype, device="cpu", enable_memory_saver=False, **values)


def build_dsa(dtype: torch.dtype = torch.bfloat16, cls: Any = None, **overrides: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    values = {"size": 256, "page_size": 64, "layer_num": 3, "index_head_dim": 128, "kv_cache_dim": 576} | LATENT
    return (cls or DSATokenToKVPool)(dtype=dtype, device="cpu", enable_memory_saver=False, **values | overrides)


def latent_views(pool: Any, group: str = "mla", layers: Sequence[int] | None = None) -> Views:
    views: Views = {}
    for part, tensors in (("kv", pool.kv_buffer), ("kv_scale", pool.kv_scale_buffer)):
        for index, tensor in enumerate(tensors or ()):
            number = pool.start_layer + index if layers is None else layers[index]
            views[group, f"layers.{number}.{part}"] = by_slot(tensor, pool.page_size)
    return views


def index_views(pool: Any, group: str = "indexer", layers: Sequence[int] | None = None) -> Views:
    """A row of SGLang's tensor is a page: 128 bytes of key for each (pooled) token, then four of scale for each."""
    views: Views = {}
    for index, tensor in enumerate(pool.index_k_with_scale_buffer):
        if tensor.shape[0]:
            keys = pool.page_size // pool.index_kpool * 128
            number = pool.start_layer + index if layers is None else layers[index]
            views[group, f"layers.{number}.index_k"] = lambda page, t=tensor, n=keys: t[page, :n]
            views[group, f"layers.{number}.index_k_scale"] = lambda page, t=tensor, n=keys: t[page, n:]
    return views


def write_latent(pool: Any, group: str, slots: torch.Tensor) -> None:
    for number in range(pool.start_layer, pool.start_layer + pool.layer_num):
        pool.set_kv_buffer(layer(number), slots, random_rows(len(slots), 1, 576), random_rows(len(slots), 1, 576))


def write_index(pool: Any, slots: torch.Tensor, layers: Iterable[int]) -> None:
    from sglang.kernels.ops.kvcache import dsa_index_k_cache

    with interpreted(dsa_index_k_cache, "_set_k_and_s_triton_kernel"):
        for number in layers:
            keys = random_rows(len(slots), 128, dtype=torch.float8_e4m3fn)
            pool.set_index_k_scale_buffer(number, slots, keys, torch.rand(len(slots), 1) + 1)


def write_dsa(pool: Any, group: str, slots: torch.Tensor) -> None:
    if group == "indexer":
        write_index(pool, slots, [n for n in range(pool.layer_num) if pool.index_k_with_scale_buffer[n].shape[0]])
    else:
        write_latent(pool, group, slots)


def latent_cases() -> Iterator[Case]:
    yield Case(name="MLA", build=build_mla, views=latent_views, write=write_latent)
    yield Case(name="MLA, page size 1", build=lambda: build_mla(page_size=1), views=latent_views, write=write_latent)
    yield Case(name="MLA, fp8", build=lambda: build_mla(torch.float8_e4m3fn), views=latent_views, write=write_latent)
    yield Case(
        name="MLA FP4",
        build=lambda: build_mla(torch.float4_e2m1fn_x2, "MLATokenToKVPoolFP4"),
        views=latent_views,
        write=write_latent,
    )
    views = lambda pool: latent_views(pool) | index_views(pool)  # noqa: E731
    yield Case(
        name="DSA, one layer without an indexer",
        build=lambda: build_dsa(skip_topk_layers=[False, True, False]),
        views=views,
        write=write_dsa,
    )
    yield Case(
        name="DSA, fp8 rows of 656 bytes", build=lambda: build_dsa(torch.float8_e4m3fn, kv_cache_dim=656), views=views
    )
    yield Case(
        name="DSA, one index key for two tokens",
        build=lambda: build_dsa(
            page_size=128, index_kpool=2, index_kpool_compress=True, tail_extra_slots=2, max_running_requests=600
        ),
        views=views,
        listed={
            f"_compress_tail_{part}.{n}": f"layers.{n}.index_tail_{part}" for part in ("k", "score") for n in range(3)
        },
    )


# -- full and window layers


def build_window(**overrides: Any) -> Any:
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    values = {"size": SLOTS, "size_swa": SLOTS // 2, "page_size": TOKENS, "head_num": HEADS, "head_dim": WIDTH}
    values |= {"swa_attention_layer_ids": [0, 2, 4], "full_attention_layer_ids": [1, 3]} | overrides
    pool = SWAKVPool(dtype=torch.bfloat16, device="cpu", **values)
    # The allocator puts its table of slots into the pool.
    pool.allocator = SWATokenToKVPoolAllocator(
        values["size"], values["size_swa"], values["page_size"], torch.bfloat16, "cpu", pool, False
    )
    return pool


def build_latent_window() -> Any:
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MLATokenToKVPool

    common = {"page_size": 64, "device": "cpu", "enable_memory_saver": False} | LATENT
    return build_window(
        size=256,
        size_swa=128,
        page_size=64,
        full_kv_pool_class=DSATokenToKVPool,
        swa_kv_pool_class=MLATokenToKVPool,
        full_kv_pool_kwargs=common | {"index_head_dim": 128, "kv_cache_dim": 576},
        swa_kv_pool_kwargs=common,
    )


def write_window(pool: Any, group: str, slots: torch.Tensor) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    for number, (_, is_window) in pool.layers_mapping.items():
        if is_window == (group == "swa"):
            rows = random_rows(len(slots), HEADS, WIDTH)
            where = KVWriteLoc(slots, swa_loc=slots, physical=True)
            pool.set_kv_buffer(layer(number), where, rows, random_rows(len(slots), HEADS, WIDTH))


def window_cases() -> Iterator[Case]:
    mapping = {"full_to_swa_index_mapping": "full_to_swa_index_mapping"}
    for tokens in (1, TOKENS):
        yield Case(
            name=f"SWA, page size {tokens}",
            build=lambda tokens=tokens: build_window(page_size=tokens),
            views=lambda pool: (
                dense_views(pool.full_kv_pool, layers=[1, 3]) | dense_views(pool.swa_kv_pool, "swa", [0, 2, 4])
            ),
            write=write_window,
            listed=mapping,
        )
    yield Case(
        name="SWA, DSA and MLA inside",
        build=build_latent_window,
        views=lambda pool: (
            latent_views(pool.full_kv_pool, layers=[1, 3])
            | index_views(pool.full_kv_pool, layers=[1, 3])
            | latent_views(pool.swa_kv_pool, "swa", [0, 2, 4])
        ),
        listed=mapping,
    )


# -- recurrent states


def build_states(**overrides: Any) -> Any:
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import MambaPool

    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=64, n_groups=1, num_heads=4, head_dim=16, state_size=8, conv_kernel=4
    )
    layers = [0, 2]
    values = {"size": 6, "spec_state_size": 3, "cache_params": Mamba2CacheParams(shape=shape, layers=layers)}
    return MambaPool(mamba_layer_ids=layers, device="cpu", **values | overrides)


def build_states_with_company() -> Any:
    from sglang.srt.mem_cache.ple_state_pool import NGramPool, ShortConvPool

    pool = build_states()
    pool.register_slot_state(
        ShortConvPool(size=6, state_shape=(64, 3), layer_ids=[0, 1], dtype=torch.bfloat16, device="cpu")
    )
    pool.register_slot_state(NGramPool(size=6, context_len=4, eos_token_id=2, device="cpu"))
    return pool


def state_views(pool: Any, *, company: bool = False) -> Views:
    cache = pool.mamba_cache
    views: Views = {}
    for index, number in enumerate(pool.mamba_layer_ids):
        for n, conv in enumerate(cache.conv):
            views["state", f"layers.{number}.conv{n}"] = by_page(conv[index])
        views["state", f"layers.{number}.temporal"] = by_page(cache.temporal[index])
    if company:
        short, ngram = pool._slot_siblings
        views["state", "ple_ngram"] = by_page(ngram.context)
        for index in range(2):
            views["state", f"layers.{index}.ple_short_conv"] = by_page(short.conv_state[index])
    return views


def write_states(pool: Any, group: str, slots: torch.Tensor) -> None:
    """A state moves to another slot when the prefix cache takes a copy of it. The source is another page."""
    source = torch.full_like(slots, 2)
    for _, tensor in _named(pool.mamba_cache):
        tensor[:, 2] = random_rows(*tensor[:, 2].shape, dtype=tensor.dtype)
    pool.copy_from(source, slots)


def _named(cache: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((f"conv{n}", conv) for n, conv in enumerate(cache.conv))
    yield "temporal", cache.temporal


def build_hybrid(**overrides: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    values = {"size": SLOTS, "page_size": TOKENS, "head_num": HEADS, "head_dim": WIDTH, "mamba_pool": build_states()}
    return HybridLinearKVPool(dtype=torch.bfloat16, device="cpu", full_attention_layer_ids=[1, 3], **values | overrides)


def write_hybrid(pool: Any, group: str, slots: torch.Tensor) -> None:
    if group == "state":
        return write_states(pool.mamba_pool, group, slots)
    for number in (1, 3):
        rows = random_rows(len(slots), HEADS, WIDTH)
        pool.set_kv_buffer(layer(number), slots, rows, random_rows(len(slots), HEADS, WIDTH))
    return None


def build_compressed_index() -> Any:
    from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool

    return QSATokenToKVPool(
        size=SLOTS,
        dtype=torch.bfloat16,
        page_size=TOKENS,
        head_num=HEADS,
        head_dim=WIDTH,
        full_attention_layer_ids=[1, 3],
        device="cpu",
        mamba_pool=build_states(),
        qsa_index_kv_heads=1,
        qsa_index_head_dim=32,
        qsa_compress_ratio=4,
        qsa_token_topk=8,
        num_request_slots=300,
    )


def write_compressed_index(pool: Any, group: str, slots: torch.Tensor) -> None:
    if group != "indexer":
        return write_hybrid(pool, group, slots)
    last = slots[(slots + 1) % 4 == 0]  # the token that completes a group of four
    for number in (1, 3):
        pool.set_qsa_compressed_k_buffer(number, last // 4, random_rows(len(last), 1, 32))
    return None


def state_cases() -> Iterator[Case]:
    yield Case(name="Mamba", build=build_states, views=state_views, write=write_states)
    yield Case(
        name="Mamba, with speculative scratch",
        build=lambda: build_states(speculative_num_draft_tokens=3),
        views=state_views,
        write=write_states,
        listed={"intermediate_ssm": "intermediate_ssm", "intermediate_conv_window": "intermediate_conv_window"}
        | {"intermediate_conv_window.0": "intermediate_conv_window"}
        | {"_intermediate_conv_window_phys.0": "intermediate_conv_window"},
    )
    yield Case(
        name="Mamba, with what rides along in its slots",
        build=build_states_with_company,
        views=lambda pool: state_views(pool, company=True),
    )
    yield Case(
        name="Hybrid: MHA and Mamba",
        build=build_hybrid,
        views=lambda pool: dense_views(pool.full_kv_pool, layers=[1, 3]) | state_views(pool.mamba_pool),
        write=write_hybrid,
    )
    yield Case(
        name="Hybrid: DSA, no states on this rank",
        build=lambda: build_hybrid(
            size=256,
            page_size=64,
            mamba_pool=None,
            use_mla=True,
            use_dsa=True,
            index_head_dim=128,
            kv_cache_dim=576,
            **LATENT,
        ),
        views=lambda pool: (
            latent_views(pool.full_kv_pool, layers=[1, 3]) | index_views(pool.full_kv_pool, layers=[1, 3])
        ),
    )
    yield Case(
        name="QSA",
        build=build_compressed_index,
        views=lambda pool: (
            dense_views(pool.full_kv_pool, layers=[1, 3])
            | state_views(pool.mamba_pool)
            | {
                ("indexer", f"layers.{number}.index_k"): by_slot(tensor, TOKENS // 4)
                for number, tensor in zip((1, 3), pool.qsa_compressed_k_buffer_pool, strict=True)
            }
        ),
        write=write_compressed_index,
        listed={
            "qsa_key_state_buffer_pool.0": "layers.1.index_key_state",
            "qsa_key_state_buffer_pool.1": "layers.3.index_key_state",
            "qsa_rope_position_buffer": "qsa_rope_position_buffer",
        },
        raw=("qsa_compressed_flat",),
    )


# -- sparse pools


def build_minimax(**overrides: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool

    values = {"size": SLOTS, "page_size": TOKENS, "head_num": HEADS, "head_dim": WIDTH, "idx_head_dim": 32}
    values |= {"dense_layer_ids": [0], "sparse_layer_ids": [1, 2, 3], "disable_value_sparse_layer_ids": [2]}
    return MiniMaxSparseKVPool(dtype=torch.bfloat16, device="cpu", start_layer=0, end_layer=4, **values | overrides)


def write_minimax(pool: Any, group: str, slots: torch.Tensor) -> None:
    heads, width = (HEADS, WIDTH) if group == "full" else (1, 32)
    k, v = (random_rows(len(slots), heads, width) for _ in "kv")
    for number in range(4):
        if group == "full":
            pool.set_kv_buffer(layer(number), slots, k, v)
        elif number == 2:
            pool.set_index_k_buffer(layer(number), slots, k)
        elif number:
            pool.set_index_kv_buffer(layer(number), slots, k, v)


def build_packed(**overrides: Any) -> Any:
    from sglang.srt.mem_cache.minimax_m3_nvfp4_pool import MiniMaxM3Nvfp4KVPool

    values = {"size": 256, "page_size": 128, "head_num": 2, "head_dim": 128, "idx_head_dim": 128}
    values |= {"dense_layer_ids": [], "sparse_layer_ids": [0, 1], "disable_value_sparse_layer_ids": [0, 1]}
    return MiniMaxM3Nvfp4KVPool(dtype=torch.bfloat16, device="cpu", start_layer=0, end_layer=2, **values | overrides)


def write_packed(pool: Any, group: str, slots: torch.Tensor) -> None:
    def rows(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, (len(slots), *shape), dtype=torch.uint8)

    for number in range(2):
        if group == "full":
            pool.main_pool.set_quantized_kv_buffer(number, slots, rows(2, 64), rows(2, 64), rows(2, 8), rows(2, 8))
        else:
            pool.index_k_pool.set_quantized_k_buffer(number, slots, rows(64), rows(8))


def build_recycled_minimax() -> Any:
    pool = build_minimax(enable_hisparse=True)
    pool.register_mapping(torch.zeros(2 * SLOTS + TOKENS + 1, dtype=torch.int64))
    return pool


def build_recycled_dsa() -> Any:
    from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseDSATokenToKVPool

    return build_dsa(cls=HiSparseDSATokenToKVPool)


def sparse_cases() -> Iterator[Case]:
    packed = ("k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer")
    yield Case(
        name="MiniMax sparse",
        build=build_minimax,
        views=lambda pool: (
            dense_views(pool.main_pool)
            | dense_views(pool.index_kv_pool, "indexer", [1, 3])
            | dense_views(pool.index_k_pool, "indexer", [2])
        ),
        write=write_minimax,
    )
    yield Case(
        name="MiniMax M3 NVFP4",
        build=build_packed,
        views=lambda pool: (
            dense_views(pool.main_pool, paged=packed) | dense_views(pool.index_k_pool, "indexer", paged=packed)
        ),
        write=write_packed,
        raw=("slab", "rows"),
    )
    yield Case(
        name="HiSparse DSA",
        build=build_recycled_dsa,
        views=index_views,
        write=lambda pool, group, slots: write_index(pool, slots, range(3)),
        listed={f"kv_buffer.{n}": f"layers.{n}.kv" for n in range(3)},
    )
    yield Case(
        name="HiSparse MiniMax",
        build=build_recycled_minimax,
        views=lambda pool: (
            dense_views(pool.dense_pool, layers=[0])
            | dense_views(pool.index_kv_pool, "indexer", [1, 3])
            | dense_views(pool.index_k_pool, "indexer", [2])
        ),
        listed={
            f"main_pool.{part}_buffer.{index}": f"layers.{number}.{part}"
            for part in "kv"
            for index, number in enumerate((1, 2, 3))
        }
        | {"full_to_hisparse_device_index_mapping": "full_to_hisparse_device_index_mapping"},
    )


def all_cases() -> list[Case]:
    from engines.sglang.deepseek_v4_cases import deepseek_v4_cases
    from engines.sglang.unified_cases import unified_cases

    groups = (dense_cases, latent_cases, window_cases, state_cases, sparse_cases, deepseek_v4_cases, unified_cases)
    return [case for group in groups for case in group()]
