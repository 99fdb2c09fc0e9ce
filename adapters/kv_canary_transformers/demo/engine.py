"""The embedded engine: a random Llama of a few million parameters and a continuous-batching manager for it."""

from __future__ import annotations

from typing import Any

import torch

PAGE_TOKENS = 16
VOCABULARY = 512


def build_model(*, device: str = "cpu", seed: int = 0, dtype: torch.dtype | None = None, **overrides: Any) -> Any:
    """A Llama with random weights, the same ones for the same seed. `overrides` go to its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "attn_implementation": "sdpa",
    }
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **overrides}))
    torch.set_rng_state(state)
    return model.to(dtype or (torch.bfloat16 if device == "cuda" else torch.float32)).to(device).eval()


def build_manager(model: Any, *, pages: int, batch_tokens: int = 256, **overrides: Any) -> Any:
    """A manager over a cache of `pages` pages of 16 tokens, greedy decoding, no end-of-sequence token."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    return model.init_continuous_batching(
        generation_config=GenerationConfig(max_new_tokens=32, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE_TOKENS, num_blocks=pages, max_batch_tokens=batch_tokens, **overrides
        ),
    )
