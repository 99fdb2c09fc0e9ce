"""The requests that hold blocks, how far their blocks are complete, and the identities at the ends of those.

On the scheduler's thread alone.

When is a block complete? At the beginning of a step, all tokens up to `min(num_computed_tokens, num_tokens)` of a
request have their KV written by steps that were launched before: `num_computed_tokens` counts what was scheduled (draft
tokens that were rejected are taken off again; under asynchronous scheduling it is ahead of that), and `num_tokens` are
the tokens that are known for good, so a position below both was scheduled with its final token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kv_canary.identity import Prefix
from kv_canary.identity_kernel import compiled_extend_each
from kv_canary_vllm.tokens import salt_of, tokens_between

_NEVER = 1 << 62


@dataclass(slots=True)
class Chain:
    """The identities at the ends of a request's leading blocks of one size; `sealed` of them are dealt with."""

    prefix: Prefix
    sealed: int = 0
    identities: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Live:
    """A request that holds blocks. `known` is false when its identities cannot be known."""

    request: Any
    handle: int
    known: bool
    chains: dict[int, Chain]
    next_end: int  # tokens after which the next block is complete

    def look_ahead(self) -> None:
        self.next_end = min((chain.sealed + 1) * size for size, chain in self.chains.items())


class Requests:
    """Live requests by id. Handles stand for their names; the workers are told which is whose, and which are gone."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes` are the block sizes, in tokens, of the groups whose blocks are sealed; ascending."""
        self.live: dict[str, Live] = {}
        self._sizes = sizes
        self._extend_each = compiled_extend_each()
        self._handles = 0
        self._names: dict[int, str] = {}
        self._gone: list[int] = []

    def meet(self, request: Any) -> Live:
        live = self.live.get(request.request_id)
        if live is None:
            self._handles += 1
            salt = salt_of(request)
            start = Prefix.empty(salt or 0)
            live = self.live[request.request_id] = Live(
                request,
                self._handles,
                salt is not None,
                {size: Chain(start) for size in self._sizes},
                self._sizes[0] if self._sizes else _NEVER,
            )
            self._names[live.handle] = request.request_id
        return live

    def leave(self, live: Live) -> None:
        self.live.pop(live.request.request_id, None)
        self._gone.append(live.handle)

    def clear(self) -> None:
        self.live.clear()
        self._names.clear()
        self._gone.clear()

    def name_all(self) -> None:
        """Somebody begins to listen: every name is told again."""
        self._names.update({live.handle: request_id for request_id, live in self.live.items()})

    def take_names(self) -> dict[int, str]:
        names, self._names = self._names, {}
        return names

    def take_gone(self) -> list[int]:
        gone, self._gone = self._gone, []
        return gone

    def extend(self, live: Live, size: int, blocks: int) -> Chain:
        """The chain of one block size, `blocks` blocks long at least; those count as dealt with."""
        chain = live.chains[size]
        if blocks > chain.sealed:
            if live.known:
                tokens = tokens_between(live.request, chain.sealed * size, blocks * size)
                chain.prefix, identities = chain.prefix.extended(tokens, size)
                chain.identities.extend(identities.tolist())
            chain.sealed = blocks
        live.look_ahead()
        return chain

    def complete(self, lives: Iterable[Live]) -> Iterator[tuple[Live, int, int, int]]:
        """(request, block size, first, last): blocks first .. last - 1 are complete now and were not before.

        Decoding requests complete one block at a time: those are hashed in one go.
        """
        single: dict[int, list[tuple[Live, list[int]]]] = {}
        for live in lives:
            request = live.request
            if request.num_computed_tokens < live.next_end:
                continue
            complete = min(request.num_computed_tokens, request.num_tokens)
            for size, chain in live.chains.items():
                first, last = chain.sealed, complete // size
                if last == first + 1 and live.known:
                    single.setdefault(size, []).append((live, tokens_between(request, first * size, last * size)))
                elif last > first:
                    self.extend(live, size, last)
                    yield live, size, first, last
        for size, entries in single.items():
            chains = [live.chains[size] for live, _ in entries]
            prefixes, identities = self._extend_each([c.prefix for c in chains], [tokens for _, tokens in entries])
            for (live, _), chain, prefix, identity in zip(entries, chains, prefixes, identities, strict=True):
                chain.prefix = prefix
                chain.identities.append(identity)
                chain.sealed += 1
                live.look_ahead()
                yield live, size, chain.sealed - 1, chain.sealed
