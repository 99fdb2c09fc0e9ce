"""Which SGLang class has which attacher. A subclass that is not named here has that of its nearest ancestor."""

from __future__ import annotations

from collections.abc import Mapping

from kv_canary.registry import PoolAttacher, register_pool_attacher, supported_pools
from kv_canary_sglang.pools.deepseek_v4 import attach_deepseek_v4
from kv_canary_sglang.pools.dense import attach_dense, attach_page_rows
from kv_canary_sglang.pools.hisparse import attach_recycled_dense, attach_recycled_latent
from kv_canary_sglang.pools.latent import attach_latent, attach_sparse_latent
from kv_canary_sglang.pools.minimax import attach_sparse
from kv_canary_sglang.pools.refused import EMPTY, INTERLEAVED, LAYER_SPLIT, NPU, refuse
from kv_canary_sglang.pools.states import attach_states
from kv_canary_sglang.pools.wrappers import attach_compressed_index, attach_hybrid, attach_window

_CACHE = "sglang.srt.mem_cache"
_ASCEND = "sglang.srt.hardware_backend.npu"

ATTACHERS: Mapping[str, PoolAttacher] = {
    f"{_CACHE}.memory_pool.MHATokenToKVPool": attach_dense,
    f"{_CACHE}.memory_pool.MHATokenToKOnlyPool": attach_dense,
    f"{_CACHE}.memory_pool.NoOpMHATokenToKVPool": refuse(EMPTY),
    f"{_CACHE}.memory_pool.MLATokenToKVPool": attach_latent,
    f"{_CACHE}.memory_pool.DSATokenToKVPool": attach_sparse_latent,
    f"{_CACHE}.memory_pool.HybridLinearKVPool": attach_hybrid,
    f"{_CACHE}.memory_pool.MambaPool": attach_states,
    f"{_CACHE}.memory_pool.MiniMaxSparseKVPool": attach_sparse,
    f"{_CACHE}.minimax_m3_nvfp4_pool.MiniMaxM3Nvfp4MainKVPool": attach_page_rows,
    f"{_CACHE}.minimax_m3_nvfp4_pool.MiniMaxM3Nvfp4IndexKPool": attach_page_rows,
    f"{_CACHE}.swa_memory_pool.SWAKVPool": attach_window,
    f"{_CACHE}.deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool": attach_deepseek_v4,
    f"{_CACHE}.qsa_kv_pool.QSATokenToKVPool": attach_compressed_index,
    f"{_CACHE}.hisparse_memory_pool.HiSparseDSATokenToKVPool": attach_recycled_latent,
    f"{_CACHE}.hisparse_memory_pool.HiSparseMHAMainPool": attach_recycled_dense,
    f"{_CACHE}.dsa_cache_layer_split.LayerSplitDSATokenToKVPool": refuse(LAYER_SPLIT, kind="mla"),
    f"{_CACHE}.page_interleave_pool.PageInterleaveKVPoolMixin": refuse(INTERLEAVED),
    f"{_ASCEND}.memory_pool_npu.NPUMHATokenToKVPool": refuse(NPU),
    f"{_ASCEND}.memory_pool_npu.NPUMHATokenToKOnlyPool": refuse(NPU),
    f"{_ASCEND}.memory_pool_npu.NPUMLATokenToKVPool": refuse(NPU, kind="mla"),
    f"{_ASCEND}.dsv4.dsv4_memory_pool.DSV4NPUTokenToKVPool": refuse(NPU, kind="mla"),
}


def register() -> None:
    """Puts SGLang's pools into the pool registry; an attacher that a user has registered for a class stays."""
    for name in ATTACHERS.keys() - set(supported_pools()):
        register_pool_attacher(name, ATTACHERS[name])
