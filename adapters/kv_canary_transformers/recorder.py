"""Recorder: translates what happens to the blocks of one allocator into ledger events. Runs on the engine's thread.

It follows the engine's calls, never its hashes: what a block holds is derived from the request's own tokens, and when
it is complete from how far the request's forward passes have come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kv_canary.identity import UNKNOWN_IDENTITY, Prefix
from kv_canary.identity_kernel import compiled_extend_each
from kv_canary.ledger import Fence, HostLedger, Manifest


@dataclass(slots=True)
class Progress:
    """One request's blocks: how many of its leading ones are sealed, and the identity at the end of each of those."""

    sealed: int = 0
    prefix: Prefix = field(default_factory=Prefix.empty)
    identities: list[int] = field(default_factory=list)

    def copy(self) -> Progress:
        return Progress(self.sealed, self.prefix, list(self.identities))

    def identity(self, block: int) -> int:
        return self.identities[block] if block < len(self.identities) else UNKNOWN_IDENTITY


class Recorder:
    """One allocator and its ledger."""

    def __init__(self, allocator: Any, ledger: HostLedger, fence: Callable[[], Fence | None]) -> None:
        self.allocator = allocator
        self.ledger = ledger
        self.index: int = allocator.index
        self.page_tokens: int = allocator.tokens_per_page
        self.window: int | None = getattr(allocator, "sliding_window", None)
        self.requests: dict[str, Progress] = {}
        self.owner = ""  # of the blocks that the pool hands out next
        self._fence = fence
        self._extend_each = compiled_extend_each()
        self._held_frees: list[int] | None = None

    # Blocks leave the pool and come back

    def blocks_given(self, blocks: Sequence[int]) -> None:
        if blocks:
            self.ledger.allocate(blocks, self.owner)

    def blocks_freed(self, blocks: Sequence[int]) -> None:
        if self._held_frees is not None:
            self._held_frees.extend(blocks)
        elif blocks:
            self.ledger.free(blocks, fence=self._fence())

    def request_ends(self, request_id: str) -> None:
        self.requests.pop(request_id, None)
        if blocks := self.allocator.block_table.get(request_id):
            self.ledger.release(blocks, request_id)

    # Sharing

    def prefix_taken(self, request_id: str, prompt: Sequence[int] | None) -> None:
        blocks = self.allocator.block_table[request_id]
        progress = self.requests[request_id] = Progress()
        if prompt is not None:
            self._advance(progress, prompt[: len(blocks) * self.page_tokens])
        progress.sealed = len(blocks)
        self.ledger.claim(blocks, [progress.identity(i) for i in range(len(blocks))], request_id)

    def forked(self, source: str, target: str, fresh: Sequence[int]) -> None:
        table = self.allocator.block_table[target]
        shared = table[: len(table) - len(fresh)]
        progress = self.requests.get(source, Progress()).copy()
        progress.sealed = min(progress.sealed, len(table))
        self.requests[target] = progress
        if shared:
            self.ledger.claim(shared, [progress.identity(i) for i in range(len(shared))], target)

    def copying(self, targets: Sequence[int]) -> None:
        if targets:
            self.ledger.write(targets)

    def copied(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if sources:
            self.ledger.move(sources, targets, fence=self._fence())

    def deduplication_begins(self, request_id: str) -> list[int]:
        self._held_frees = []
        return list(self.allocator.block_table.get(request_id, ()))

    def deduplication_ends(self, request_id: str, before: list[int]) -> None:
        """The request may have swapped fresh blocks for existing ones with the same tokens, and given the fresh ones
        up.
        """
        freed, self._held_frees = self._held_frees or [], None
        progress = self.requests.get(request_id, Progress())
        swapped = [
            (index, old, new)
            for index, (old, new) in enumerate(
                zip(before, self.allocator.block_table.get(request_id, ()), strict=False)
            )
            if old != new
        ]
        if swapped:
            self.ledger.claim([new for _, _, new in swapped], [progress.identity(i) for i, _, _ in swapped], request_id)
            self.ledger.release([old for _, old, _ in swapped], request_id)
        self.blocks_freed(freed)

    def settle(self) -> None:
        """Between two steps nothing is held back (an engine call may have failed half way)."""
        freed, self._held_frees = self._held_frees, None
        self.owner = ""
        self.blocks_freed(freed or [])

    # Steps

    def pages_of_step(self, request_id: str, past: int, length: int) -> list[int]:
        """Blocks that a forward pass over `length` tokens at position `past` writes."""
        table = self.allocator.block_table.get(request_id, ())
        if not length or not table:
            return []
        if self.window is None and length == 1:  # nearly always: a sequence that decodes
            block = past // self.page_tokens
            return table[block : block + 1]  # type: ignore[no-any-return]
        if self.window is None:
            return list(table[past // self.page_tokens : (past + length - 1) // self.page_tokens + 1])
        stored = min(length, self.window)
        first = past + length - stored
        slots = {(first + i) % self.window // self.page_tokens for i in range(0, stored, self.page_tokens)}
        slots.add((past + length - 1) % self.window // self.page_tokens)
        return [table[slot] for slot in sorted(slots) if slot < len(table)]

    def progress_of(self, request_id: str) -> Progress:
        progress = self.requests.get(request_id)
        if progress is None:
            progress = self.requests[request_id] = Progress()
        return progress

    def completes(self, progress: Progress, computed: int) -> bool:
        """Whether a request with so many tokens in place has a block that is complete and not sealed."""
        return self.window is None and computed // self.page_tokens > progress.sealed

    def completed(self, steps: Iterable[tuple[Any, Progress, int]]) -> tuple[list[int], list[int]]:
        """Blocks that are complete now, and their identities, of (request state, progress, tokens in place now).

        A request that gave its blocks up while the step was in flight has none. Decoding requests complete one block at
        a time: those are hashed in one pass.
        """
        pages: list[int] = []
        identities: list[int] = []
        single: list[tuple[Progress, list[int], int]] = []
        for state, progress, computed in steps:
            first, last = progress.sealed, computed // self.page_tokens
            if last <= first or self.window is not None or self.requests.get(state.request_id) is not progress:
                continue
            table = self.allocator.block_table.get(state.request_id, ())
            last = min(last, len(table))
            tokens = tokens_between(state, progress.prefix.length, last * self.page_tokens)
            progress.sealed = last
            if len(tokens) == self.page_tokens and last == first + 1:
                single.append((progress, tokens, table[first]))
                continue
            self._advance(progress, tokens)
            pages.extend(table[first:last])
            identities.extend(progress.identity(block) for block in range(first, last))
        if single:
            extended, hashes = self._extend_each([one[0].prefix for one in single], [one[1] for one in single])
            for (progress, _, page), prefix, identity in zip(single, extended, hashes, strict=True):
                progress.prefix = prefix
                progress.identities.append(identity)
                pages.append(page)
                identities.append(identity)
        return pages, identities

    def _advance(self, progress: Progress, tokens: Sequence[int]) -> None:
        whole = len(tokens) - len(tokens) % self.page_tokens
        progress.prefix, identities = progress.prefix.extended(tokens[:whole], self.page_tokens)
        progress.identities.extend(identities.tolist())

    def restored(self, state: Any, blocks: Sequence[int], manifest: Manifest) -> None:
        """Complete blocks of a request are copied back from the CPU: they hold the tokens that it has by now."""
        progress = self.requests[state.request_id] = Progress()
        self._advance(progress, tokens_between(state, 0, len(blocks) * self.page_tokens))
        progress.sealed = len(blocks)
        identities = [progress.identity(index) for index in range(len(blocks))]
        self.ledger.admit(blocks, manifest, identities, fence=self._fence())

    # Everything anew, from the engine's tables

    def resync(self, states: dict[str, Any], free: Iterable[int]) -> None:
        """Tells the ledger every block's state. `states` maps request ids to the engine's request states."""
        self.ledger.reset()
        self.requests.clear()
        self._held_frees = None
        sealed: dict[int, list[Any]] = {
            block: [UNKNOWN_IDENTITY, "", 0] for block in self.allocator.ledger.cached_blocks
        }
        opened: list[tuple[str, list[int]]] = []
        for request_id, table in self.allocator.block_table.items():
            progress = self.requests[request_id] = Progress()
            if (state := states.get(request_id)) is not None and self.window is None:
                tokens = tokens_between(state, 0, state.position_offset)
                self._advance(progress, tokens)
                progress.sealed = min(len(progress.identities), len(table))
            for index, block in enumerate(table[: progress.sealed]):
                entry = sealed.setdefault(block, [UNKNOWN_IDENTITY, "", 0])
                entry[0], entry[1], entry[2] = progress.identity(index), request_id, entry[2] + 1
            opened.append((request_id, list(table[progress.sealed :])))
        if sealed:
            identities, owners, counts = zip(*sealed.values(), strict=True)
            self.ledger.adopt(list(sealed), identities, owners, owners=counts, fence=self._fence())
        held: set[int] = set()
        for request_id, blocks in opened:
            if fresh := [block for block in blocks if block not in held]:
                self.ledger.allocate(fresh, request_id)
            if shared := [block for block in blocks if block in held]:  # of a fork: one page, two owners by right
                self.ledger.claim(shared, UNKNOWN_IDENTITY, request_id)
            held.update(blocks)
        if blocks := list(free):
            self.ledger.free(blocks, fence=self._fence())


def tokens_between(state: Any, start: int, stop: int) -> list[int]:
    """Tokens of a request's sequence, prompt first; as many as are known."""
    prompt = state.initial_tokens
    if stop <= len(prompt):
        return list(prompt[start:stop])
    head = list(prompt[start:])
    return head + list(state.generated_tokens[max(0, start - len(prompt)) : stop - len(prompt)])
