"""Small random models for vLLM, made on the spot: a Llama, and a Gemma whose layers are in part sliding-window."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedTokenizerFast

VOCABULARY = 256
LAYERS = 2

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,  # a block of 32 tokens is 32 KiB a layer, half of it on each of two ranks: a stripe of its own
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "dtype": "bfloat16",
}


def build_llama(folder: Path) -> Path:
    _build_tokenizer(folder)
    LlamaConfig(**_COMMON, num_hidden_layers=LAYERS, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


def build_hybrid(folder: Path) -> Path:
    """Two sliding-window and two full-attention layers, whose blocks lie over each other."""
    _build_tokenizer(folder)
    Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=4,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        architectures=["Gemma3ForCausalLM"],
    ).save_pretrained(folder)
    return folder


def _build_tokenizer(folder: Path) -> None:
    words = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(3, VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel(vocab={word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)
