"""The reference engine: requests over a paged pool, with everything that real ones do to pages.

Prefix cache, chunked prefill, decoding, drafts that are rejected, copy-on-write forks, preemption with recompute,
cancellation, eviction, sleep, and a host tier. It obeys the rules of the protocol and tells the ledger what it does,
the way an adapter would; `catalogue` breaks it on purpose. It computes nothing: what a page holds is random.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kv_canary.faults.pool import PAGE_TOKENS, Pool, Stored, Stream, Tier
from kv_canary.gate import EngineGate
from kv_canary.identity import Prefix, salt_from
from kv_canary.ledger import HostLedger, Manifest

CHUNK_TOKENS = 24  # of a prompt in one step: not whole pages, so that pages are written in pieces


@dataclass(slots=True)
class Request:
    """`computed` tokens have their KV in `pages`; the first `sealed` pages are complete and told."""

    id: str
    tokens: list[int]
    end: int  # tokens at which it is finished
    salt: str = ""
    computed: int = 0
    sealed: int = 0
    pages: list[int] = field(default_factory=list)
    identities: list[int] = field(default_factory=list)
    prefix: Prefix = field(default_factory=Prefix.empty)

    @property
    def finished(self) -> bool:
        return self.computed >= self.end


@dataclass(frozen=True, slots=True)
class Complete:
    """A page that a step completes: handed out for the `given`-th time, to be found by `key`."""

    page: int
    identity: int
    key: int
    given: int


class ReferenceEngine:
    """One engine thread's view: call `step` over and over, and the others between two steps."""

    def __init__(self, pages: int = 48, *, seed: int = 0) -> None:
        self.pool = Pool(pages, seed=seed)
        self.ledger = HostLedger("full", pages)
        self.gate = EngineGate()
        self.stream = Stream()
        self.tier = Tier()
        self.random = random.Random(seed)
        self.free = list(range(pages))
        self.active: dict[str, Request] = {}
        self.holders = [0] * pages
        self.given = [0] * pages  # how often a page was handed out
        self.eager = False  # whether a page can be found in the prefix cache before the step that completes it has run
        self.cached: OrderedDict[int, int] = OrderedDict()  # key -> page, least recently used first
        self.key_of: dict[int, int] = {}
        self.key: Callable[[int, Sequence[int]], int] = lambda identity, tokens: identity
        self.finished = 0
        self._count = 0

    # The canary's side of the engine

    def resync(self) -> None:
        self.ledger.reset()
        held: dict[int, tuple[int, str]] = {}
        for request in self.active.values():
            for page, identity in zip(request.pages[: request.sealed], request.identities, strict=False):
                held[page] = (identity, request.id)
        for page in self.cached.values():
            held.setdefault(page, (0, ""))
        if held:
            identities = [identity for identity, _ in held.values()]
            owners = [owner for _, owner in held.values()]
            self.ledger.adopt(list(held), identities, owners, owners=[self.holders[page] for page in held])
        for request in self.active.values():
            if opened := [page for page in request.pages[request.sealed :] if page not in held]:
                self.ledger.allocate(opened, request.id)
        if self.free:
            self.ledger.free(self.free, fence=self.stream.here())

    def quarantine(self, space: str, page: int) -> str:
        key = self.key_of.pop(page, None)
        if key is None:
            return "quarantine: the page was not in the prefix cache"
        del self.cached[key]
        if not self.holders[page]:
            self._free([page])
        return "quarantine: taken out of the prefix cache"

    @property
    def _told(self) -> bool:
        return self.gate.recording

    # Requests

    def submit(self, tokens: Sequence[int], new_tokens: int = 8, *, salt: str = "", id: str | None = None) -> Request:
        """Takes a request in; what the prefix cache has of it is claimed at once."""
        self._count += 1
        request = Request(id or f"r{self._count}", list(tokens), len(tokens) + new_tokens, salt)
        request.prefix = Prefix.empty(salt_from(salt) if salt else 0)
        self.active[request.id] = request
        self._match(request)
        return request

    def _match(self, request: Request) -> None:
        """An exact full hit leaves one token to compute, so its last page is never taken from the cache."""
        prefix, pages, identities = request.prefix, [], []
        for start in range(0, (len(request.tokens) - 1) // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
            tokens = request.tokens[start : start + PAGE_TOKENS]
            after, identity = prefix.extended(tokens, PAGE_TOKENS)
            key = self.key(int(identity[0]), request.tokens[: start + PAGE_TOKENS])
            if (page := self.cached.get(key)) is None:
                break
            self.cached.move_to_end(key)
            prefix = after
            pages.append(page)
            identities.append(int(identity[0]))
        if pages:
            self.claim(request, pages, identities)
            request.pages, request.identities = pages, identities
            request.sealed, request.computed, request.prefix = len(pages), len(pages) * PAGE_TOKENS, prefix

    def claim(self, request: Request, pages: Sequence[int], identities: Sequence[int]) -> None:
        for page in pages:
            self.holders[page] += 1
        if self._told:
            self.ledger.claim(pages, list(identities), request.id)

    def cancel(self, request: Request) -> None:
        """Its pages are let go of; complete ones may stay in the prefix cache."""
        self.active.pop(request.id, None)
        self._release(request)

    def preempt(self, request: Request) -> None:
        """Gives all its pages up, to be computed again."""
        self._release(request)
        request.prefix = Prefix.empty(salt_from(request.salt) if request.salt else 0)
        request.pages, request.identities, request.sealed, request.computed = [], [], 0, 0
        self._match(request)

    def fork(self, request: Request) -> Request:
        """A second continuation: complete pages are shared, the open one is copied."""
        self._count += 1
        child = Request(f"{request.id}-fork{self._count}", list(request.tokens), request.end + 4, request.salt)
        child.prefix, child.computed, child.sealed = request.prefix, request.computed, request.sealed
        child.identities = list(request.identities)
        child.pages = request.pages[: request.sealed]
        self.active[child.id] = child
        if child.pages:
            self.claim(child, child.pages, child.identities[: child.sealed])
        for page in request.pages[request.sealed :]:
            (target,) = self.allocate(1, child.id, keep=(request, child))
            child.pages.append(target)
            if self._told:
                self.ledger.move([page], [target], child.id, fence=self.stream.here())
            self.stream.launch(lambda page=page, target=target: self._copy(page, target))  # type: ignore[misc]
        return child

    def _copy(self, page: int, target: int) -> None:
        self.pool.bytes[target] = self.pool.bytes[page]

    # Pages

    def allocate(self, count: int, owner: str, *, keep: Sequence[Request] = ()) -> list[int]:
        """Pages from the free list; where it is short, cached pages nobody holds are evicted, then a request."""
        while len(self.free) < count and self.evict(1):
            pass
        while len(self.free) < count:
            victims = [one for one in self.active.values() if one.pages and one not in keep]
            if not victims:
                raise RuntimeError("the reference pool is too small for its requests")
            self.preempt(victims[-1])
            while len(self.free) < count and self.evict(1):
                pass
        pages = [self.free.pop(0) for _ in range(count)]
        for page in pages:
            self.holders[page] += 1
            self.given[page] += 1
        if pages and self._told:
            self.ledger.allocate(pages, owner)
        return pages

    def evict(self, count: int) -> int:
        """Frees cached pages that nobody holds, the least recently used first."""
        pages = [page for page in self.cached.values() if not self.holders[page]][:count]
        for page in pages:
            del self.cached[self.key_of.pop(page)]
        self._free(pages)
        return len(pages)

    def _release(self, request: Request) -> None:
        if request.pages and self._told:
            self.ledger.release(request.pages, request.id)
        for page in request.pages:
            self.holders[page] -= 1
        self._free([page for page in request.pages if not self.holders[page] and page not in self.key_of])

    def _free(self, pages: Sequence[int]) -> None:
        if pages:
            self.free += pages
            if self._told:
                self.ledger.free(pages, fence=self.stream.here())

    # Steps

    def begin_step(self) -> None:
        self.gate.boundary(self)
        self.gate.steps += 1
        if self._told:
            self.ledger.step(self.gate.steps)

    def step(self, *, drafts: int = 0) -> None:
        """One forward pass over every request. With `drafts` it computes so many tokens more, which are rejected."""
        self.begin_step()
        complete: list[Complete] = []
        for request in list(self.active.values()):
            if self.active.get(request.id) is request:
                if self.eager and not request.pages:
                    self._match(request)
                self._compute(request, drafts, complete)
        self.stream.run()
        self.seal(complete)
        for request in [request for request in self.active.values() if request.finished]:
            self.finished += 1
            self.cancel(request)

    def _compute(self, request: Request, drafts: int, complete: list[Complete]) -> None:
        if request.computed == len(request.tokens):
            request.tokens.append(self.random.randrange(1000))
        count = min(CHUNK_TOKENS, len(request.tokens) - request.computed)
        first, stop = request.computed, request.computed + count
        missing = -(-(stop + drafts) // PAGE_TOKENS) - len(request.pages)
        if missing > 0:
            request.pages += self.allocate(missing, request.id, keep=(request,))
        self.write(request, first, stop + drafts)
        request.computed = stop
        whole = stop // PAGE_TOKENS
        for index in range(request.sealed, whole):
            tokens = request.tokens[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
            request.prefix, identity = request.prefix.extended(tokens, PAGE_TOKENS)
            request.identities.append(int(identity[0]))
            page, key = request.pages[index], self.key(int(identity[0]), request.tokens[: (index + 1) * PAGE_TOKENS])
            complete.append(Complete(page, int(identity[0]), key, self.given[page]))
            if self.eager:
                self._find_by(key, page)
        request.sealed = max(request.sealed, whole)

    def write(self, request: Request, first: int, stop: int) -> None:
        """Launches the KV of the tokens `first` .. `stop - 1`."""
        touched = request.pages[first // PAGE_TOKENS : (stop - 1) // PAGE_TOKENS + 1]
        if self._told:
            self.ledger.write(touched, request.id)
        for place, page in enumerate(touched, start=first // PAGE_TOKENS):
            low = max(first, place * PAGE_TOKENS) - place * PAGE_TOKENS
            high = min(stop, (place + 1) * PAGE_TOKENS) - place * PAGE_TOKENS
            self.stream.launch(lambda page=page, low=low, high=high: self.pool.write_rows(page, low, high))  # type: ignore[misc]

    def seal(self, complete: Sequence[Complete]) -> None:
        """Pages whose last token was computed in this step, as far as they were not given up in it."""
        there = [one for one in complete if self.given[one.page] == one.given and self._is_kept(one.page)]
        if there and self._told:
            identities = [one.identity for one in there]
            self.ledger.seal([one.page for one in there], identities, fence=self.stream.here())
        for one in there:
            self._find_by(one.key, one.page)

    def _is_kept(self, page: int) -> bool:
        return bool(self.holders[page]) or page in self.key_of

    def _find_by(self, key: int, page: int) -> None:
        if key not in self.cached and page not in self.key_of:
            self.cached[key] = page
            self.key_of[page] = key

    # The tier

    def offload(self, request: Request) -> None:
        """Complete pages go to the tier, and all are given up; an open page is computed again."""
        self.active.pop(request.id)
        pages = request.pages[: request.sealed]
        manifest = self.ledger.export(pages, fence=self.stream.here()) if pages and self._told else None
        self.tier.stored[request.id] = [
            Stored(data=self.pool.bytes[page].copy(), manifest=None if manifest is None else manifest.part([index]))
            for index, page in enumerate(pages)
        ]
        self._release(request)
        request.pages, request.computed = [], request.sealed * PAGE_TOKENS

    def restore(self, request: Request, *, copy: Callable[[int, Stored], None] | None = None) -> list[int]:
        """The tier's pages come back into fresh ones; returns those."""
        stored = self.tier.stored.pop(request.id)
        self.active[request.id] = request
        request.pages = self.allocate(len(stored), request.id, keep=(request,))
        if request.pages and self._told:
            self.ledger.load(request.pages, request.id)
        for page, one in zip(request.pages, stored, strict=True):
            (copy or self.fetch)(page, one)
        self.admit(request.pages, request.identities[: len(stored)], stored)
        return request.pages

    def fetch(self, page: int, stored: Stored) -> None:
        self.pool.bytes[page] = stored.data

    def admit(self, pages: Sequence[int], identities: Sequence[int], stored: Sequence[Stored]) -> None:
        if not self._told:
            return
        for page, identity, one in zip(pages, identities, stored, strict=True):
            # a copy from a time in which the canary was silent comes back with nothing to hold it against
            manifest = one.manifest if one.manifest is not None else _nothing()
            self.ledger.admit([page], manifest, np.array([identity]), fence=self.stream.here())


def _nothing() -> Manifest:
    manifest = Manifest(1)
    manifest.abandon()
    return manifest
