"""What a page's KV depends on, read off a request: its tokens, and what else the identity must tell apart.

It is derived from the request alone, never from vLLM's block hashes, so that a fault of theirs shows.
"""

from __future__ import annotations

from typing import Any

from kv_canary.identity import salt_from

_PLACEHOLDER = (1 << 62) - 1  # no token id has a bit this high


def salt_of(request: Any) -> int | None:
    """The salt of a request's identities; None when they cannot be known (the prompt is given as embeddings)."""
    if request.prompt_embeds is not None:
        return None
    parts: list[str | int] = []
    if request.lora_request is not None:
        parts += ["lora", request.lora_request.lora_name, request.lora_request.lora_path]
    if request.cache_salt:
        parts += ["cache_salt", request.cache_salt]
    return salt_from(*parts)


def tokens_between(request: Any, start: int, stop: int) -> list[int]:
    """Tokens `start` .. `stop - 1`; where an image or a sound stands in for tokens, numbers made from its hash.

    So a page in front of an image does not depend on it, and one behind does.
    """
    tokens: list[int] = request.all_token_ids[start:stop]
    features = request.mm_features
    if features:
        tokens = list(tokens)
        for feature in features:
            begin, length = feature.mm_position.offset, feature.mm_position.length
            first, last = max(begin, start), min(begin + length, stop)
            if first < last:
                salt = salt_from("mm", feature.identifier) & _PLACEHOLDER
                for position in range(first, last):
                    tokens[position - start] = (salt + position - begin) | (1 << 62)
    return tokens
