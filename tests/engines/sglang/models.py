"""Small random models for SGLang, made on the spot: a Llama, and one whose layers are in part sliding-window."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import Cohere2Config, LlamaConfig

LAYERS = 2
WINDOW = 32
_COMMON = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


def build_llama(folder: Path) -> Path:
    LlamaConfig(**_COMMON, num_hidden_layers=LAYERS, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


def build_hybrid(folder: Path) -> Path:
    """Two sliding-window and two full-attention layers, each kind in a pool of its own: a Cohere 2 that opts in to
    SGLang's hybrid pools.
    """
    config = Cohere2Config(
        **_COMMON,
        num_hidden_layers=4,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        architectures=["Cohere2ForCausalLM"],
    )
    config.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "is_hybrid_swa": True, "hybrid_layer_pattern": [1, 0] * 2})
    )
    return folder
