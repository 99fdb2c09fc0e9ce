"""Quarantine: pages that the prefix cache holds and must not hand out again.

A tree core of SGLang's cannot be told to drop a page that somebody still reads, so nothing is taken out of the tree:
the cache is asked for less. A prefix that would end on a bad page, or run over it, is matched up to the page before;
the rest is computed again, stays with its request and is not put into the tree beside the bad page. Nobody reads the
bad page any more, so the tree evicts it when it needs room, and the quarantine ends with that.

A page is named by the identity that it was sealed with: the tokens up to its end. So the device is never asked.

Who writes what. The canary thread adds names and takes them away (`Quarantined`); the scheduler's thread reads them.
Both are single operations on a dict.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kv_canary.gate import EngineGate
from kv_canary.hooks import Hooks
from kv_canary.identity import Prefix
from kv_canary_sglang.requests import salt_of


class Quarantined:
    """Identities of bad pages; the value is what ends it."""

    def __init__(self) -> None:
        self._identities: dict[int, tuple[str, int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._identities)

    def add(self, identity: int, space: str, page: int, generation: int) -> None:
        self._identities[identity] = (space, page, generation)

    def items(self) -> list[tuple[int, tuple[str, int, int]]]:
        return list(self._identities.items())

    def lift(self, identity: int) -> None:
        self._identities.pop(identity, None)

    def sound_length(self, tokens: Any, salt: int, page_size: int) -> int:
        """Tokens of a prefix before its first bad page; all of them if there is none."""
        whole = len(tokens) - len(tokens) % page_size
        _, identities = Prefix.empty(salt).extended(tokens[:whole], page_size)
        for place, identity in enumerate(identities.tolist()):
            if identity in self._identities:
                return place * page_size
        return len(tokens)


class PrefixCacheHooks:
    """Asks the prefix cache for less while something is in quarantine. Costs nothing while nothing is."""

    def __init__(self, tree: Any, page_size: int, gate: EngineGate, quarantined: Quarantined) -> None:
        self._tree = tree
        self._page_size = page_size
        self._gate = gate
        self._quarantined = quarantined

    def hook(self, hooks: Hooks) -> None:
        match, checkpoint = self._tree.match_prefix, self._tree.checkpoint

        def match_prefix(params: Any) -> Any:
            return match(self._shortened(params) if self._quarantined else params)

        def checkpoint_before(req: Any, *, up_to: int, **kwargs: Any) -> Any:
            return checkpoint(req, up_to=self._published(req, up_to) if self._quarantined else up_to, **kwargs)

        hooks.replace(self._tree, "match_prefix", match_prefix)
        hooks.replace(self._tree, "checkpoint", checkpoint_before)

    def _shortened(self, params: Any) -> Any:
        try:
            key = params.key
            tokens = key.raw_token_ids()
            sound = self._quarantined.sound_length(tokens, salt_of(key), self._page_size)
            if sound == len(tokens):
                return params
            shorter = type(key)(
                key.token_ids, key.extra_key, is_bigram=key.is_bigram, limit=sound, cache_salt=key.cache_salt
            )
            return dataclasses.replace(params, key=shorter)
        except Exception as error:  # noqa: BLE001 - the engine must never see it
            self._gate.fail("quarantine", error)
            return params

    def _published(self, req: Any, up_to: int) -> int:
        """How far a request's pages go into the tree. What the tree holds already is not taken back from a request
        that reads it: it runs on, and what it adds lies behind the bad page, where nobody gets to.
        """
        try:
            tokens = req.full_untruncated_fill_ids[:up_to]
            sound = self._quarantined.sound_length(tokens, salt_of(req), self._page_size)
            return up_to if sound >= up_to or sound < req.kv.cache_protected_len else sound
        except Exception as error:  # noqa: BLE001 - the engine must never see it
            self._gate.fail("quarantine", error)
            return up_to
