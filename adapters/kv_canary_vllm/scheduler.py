"""The scheduler's half: writes down what happens to blocks, and hands it to the workers with each step.

Everything here runs on the scheduler's thread (`Mailbox` is emptied there too), so nothing needs a lock.

Seals are told ahead of the step's own writes (`requests` says when a block is complete); the workers put a fence behind
all that was launched before. Claims are told after the writes: a block may be completed in the very step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from kv_canary.gate import EngineGate
from kv_canary.hooks import Hooks
from kv_canary.identity import UNKNOWN_IDENTITY, salt_from
from kv_canary_vllm.mailbox import Mailbox
from kv_canary_vllm.modes import GroupMode, engine_refusal, group_mode
from kv_canary_vllm.requests import Live, Requests
from kv_canary_vllm.wire import ATTRIBUTE, Event, Message, pages_of

logger = logging.getLogger("kv_canary")

PARTIAL_HITS = "prefix hits inside a block are copied on the workers, which is not modelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    place: int
    manager: Any
    mode: GroupMode
    salt: int  # tells the same tokens in two groups apart

    def identity(self, identity: int) -> int:
        return identity and (identity ^ self.salt or 1)


class SchedulerGuard:
    """Attaches to one `Scheduler` on construction; `remove` restores everything."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._cache = scheduler.kv_cache_manager
        self._pool = self._cache.block_pool
        self.gate = EngineGate()
        self._hooks = Hooks(self.gate)
        backend = scheduler.vllm_config.parallel_config.distributed_executor_backend
        self._mailbox = Mailbox(outside=backend != "uni")
        config = scheduler.kv_cache_config
        coordinator = self._cache.coordinator
        self._refusal = engine_refusal(scheduler.vllm_config, config)
        if self._refusal is None and getattr(coordinator, "enable_partial_hash_hits", False):
            self._refusal = PARTIAL_HITS
        self._groups = [
            _Group(
                place=place,
                manager=manager,
                mode=group_mode(config.kv_cache_groups[place]),
                salt=salt_from("group", place) >> 1 if place else 0,
            )
            for place, manager in enumerate(coordinator.single_type_managers)
        ]
        self._sizes = sorted({group.manager.block_size for group in self._groups if group.mode.sealed})
        self._requests = Requests(self._sizes)
        self._step = 0
        self._tables_wanted = True
        self._listening: set[int] | None = None  # ranks that record; None as long as none has said anything
        self._leaving: Live | None = None  # whose blocks are being given back
        self._claiming: tuple[Live, _Group, int] | None = None  # who claims, where, from which block on
        self._events: list[Event] = []
        self._tables: list[Event] = []
        self._tables_at = 0  # how many of the step's events the tables know already
        self._given: list[list[Any]] = []  # "allocate" events of this step, whose owners are known at its end
        self._claims: list[Event] = []  # told after the step's writes: a block may be completed in the very step
        self._reactions: list[tuple[int, str, str]] = []
        self._install()

    def remove(self) -> None:
        self._hooks.remove()
        self._mailbox.close()

    # A step

    def _begin(self) -> None:
        for message in self._mailbox.take():
            self._obey(message)
        if self._refusal is not None:
            return
        if self.gate.recording:
            self._settle()
            self._seal_complete(self._requests.live.values())
            if self._tables_wanted:
                self._tables, self._tables_at = self._snapshot(), len(self._events)
        elif self._tables_wanted:
            self.gate.open()
            self.gate.boundary(self)

    def _end(self, output: Any) -> None:
        if self.gate.recording:
            self._name_owners(output)
            self._tell_writes(output.num_scheduled_tokens)
            self._events += self._claims
            self._settle()

    def _send(self, output: Any) -> None:
        self._step += 1
        message: Message = {"step": self._step, "mailbox": self._mailbox.address}
        if self._refusal is not None:
            message["failed"] = ("mode", self._refusal)
        elif self.gate.failure is not None:
            message["failed"] = self.gate.failure
        elif self.gate.recording:
            message["events"], self._events = self._events, []
            if self._tables_wanted:
                message["tables"], self._tables = self._tables, []
                message["tables_at"] = self._tables_at
                self._tables_wanted = False
                self._requests.name_all()
            if names := self._requests.take_names():
                message["names"] = names
            if gone := self._requests.take_gone():
                message["events"].append(("gone", gone))
        if self._reactions:
            message["reactions"], self._reactions = self._reactions, []
        setattr(output, ATTRIBUTE, message)

    def _obey(self, message: dict[str, Any]) -> None:
        rank, ask = int(message.get("rank", 0)), message.get("ask")
        if ask == "tables":
            self._tables_wanted = True
            self._listening = (self._listening or set()) | {rank}
        elif ask == "off":
            self._listening = (self._listening or set()) - {rank}
            if not self._listening:
                self.gate.close()
        elif ask == "quarantine":
            for page, incident in message.get("pages", ()):
                self._reactions.append((rank, str(incident), self._quarantine(int(page))))

    def _quarantine(self, page: int) -> str:
        block = self._pool.blocks[page]
        cached = block.block_hash is not None
        self._cache.evict_blocks({page})
        if not cached:
            return "quarantine: the page was not in the prefix cache"
        if block.ref_cnt:
            return "quarantine: taken out of the prefix cache; the requests that hold it go on"
        return "quarantine: taken out of the prefix cache"

    # What the gate may ask

    def quarantine(self, space: str, page: int) -> str:
        return self._quarantine(page)

    def resync(self) -> None:
        """Recording begins (again): what was recorded before is worth nothing."""
        self._events.clear()
        self._settle()
        self._requests.clear()
        for group in self._groups:
            for request_id in group.manager.req_to_blocks:
                if (request := self._scheduler.requests.get(request_id)) is not None:
                    live = self._requests.meet(request)
                    if group.mode.sealed:
                        size = group.manager.block_size
                        self._requests.extend(live, size, min(request.num_computed_tokens, request.num_tokens) // size)
        self._tables, self._tables_at = self._snapshot(), 0

    def _snapshot(self) -> list[Event]:
        """Every block's state now, from the scheduler's own tables."""
        tables: list[Event] = []
        adopted: set[int] = set()
        for group in self._groups:
            for request_id, blocks in group.manager.req_to_blocks.items():
                self._adopt(tables, adopted, group, self._requests.live.get(request_id), blocks)
        for block in self._pool.blocks:
            if block.is_null or block.block_id in adopted:
                continue
            if block.block_hash is not None:
                place = int.from_bytes(block.block_hash[-4:], "big")
                tables.append(("adopt", [block.block_id], [UNKNOWN_IDENTITY], [0], [block.ref_cnt], place))
            elif block.ref_cnt == 0:
                tables.append(("free", [block.block_id]))
        return _merged(tables)

    def _adopt(
        self, tables: list[Event], adopted: set[int], group: _Group, live: Live | None, blocks: Sequence[Any]
    ) -> None:
        handle = live.handle if live is not None else 0
        chain = live.chains[group.manager.block_size] if live is not None and group.mode.sealed else None
        for index, block in enumerate(blocks):
            if block.is_null or block.block_id in adopted:
                continue
            adopted.add(block.block_id)
            if chain is not None and index < chain.sealed:
                identity = group.identity(chain.identities[index]) if chain.identities else UNKNOWN_IDENTITY
                tables.append(("adopt", [block.block_id], [identity], [handle], [block.ref_cnt], group.place))
            else:
                tables.append(("allocate", [([block.block_id], handle, group.place)]))

    def _seal_complete(self, lives: Iterable[Live]) -> None:
        for live, size, first, last in self._requests.complete(lives):
            self._seal(live, size, first, last)

    def _seal(self, live: Live, size: int, first: int, last: int) -> None:
        identities = live.chains[size].identities
        for group in self._groups:
            if not group.mode.sealed or group.manager.block_size != size:
                continue
            pages: list[int] = []
            known: list[int] = []
            table = group.manager.req_to_blocks.get(live.request.request_id, ())
            for index, block in enumerate(table[first:last], first):
                if not block.is_null:
                    pages.append(block.block_id)
                    known.append(group.identity(identities[index]) if identities else UNKNOWN_IDENTITY)
            if pages:
                self._events.append(("seal", pages, known))

    # Hooks

    def _install(self) -> None:
        wrap, cache, pool = self._hooks.wrap, self._cache, self._pool
        self._hooks.replace(self._scheduler, "schedule", self._around_schedule(self._scheduler.schedule))
        wrap(cache, "free", event="release", before=self._ending, after=self._ended)
        wrap(cache, "pop_blocks_for_free", event="release", before=self._ending, after=self._ended)
        wrap(pool, "get_new_blocks", event="allocate", after=self._blocks_given)
        wrap(pool, "touch", event="claim", before=self._blocks_touched)
        self._hooks.replace(pool, "free_blocks", self._around_free(pool.free_blocks))
        wrap(pool, "evict_blocks", event="free", before=self._evicting, after=self._evicted)
        wrap(pool, "reset_prefix_cache", event="free", before=self._resetting, after=self._reset)
        for group in self._groups:
            self._install_on_manager(group)

    def _install_on_manager(self, group: _Group) -> None:
        def claiming(
            request_id: str,
            new_computed_blocks: Any,
            num_local_computed_tokens: int,
            num_external_computed_tokens: int,
        ) -> None:
            skipped = group.manager.get_num_skipped_tokens(num_local_computed_tokens + num_external_computed_tokens)
            live = self._requests.meet(self._scheduler.requests[request_id])
            self._claiming = (live, group, skipped // group.manager.block_size)

        def claimed(token: None, result: None, *args: Any, **kwargs: Any) -> None:
            self._claiming = None

        self._hooks.wrap(group.manager, "add_local_computed_blocks", event="claim", before=claiming, after=claimed)

    def _around_schedule(self, original: Any) -> Any:
        def schedule(*args: Any, **kwargs: Any) -> Any:
            self._guarded("step", self._begin)
            output = original(*args, **kwargs)
            self._guarded("step", lambda: self._end(output))
            self._guarded("send", lambda: self._send(output))
            return output

        return schedule

    def _around_free(self, original: Any) -> Any:
        def free_blocks(ordered_blocks: Iterable[Any]) -> Any:
            if not self.gate.recording:
                return original(ordered_blocks)
            blocks = list(ordered_blocks)  # an iterator can be used once
            result = original(blocks)
            self._guarded("free", lambda: self._blocks_freed(blocks))
            return result

        return free_blocks

    def _guarded(self, event: str, action: Any) -> None:
        started = perf_counter()
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the engine must never see it
            self.gate.fail(event, error)
        self.gate.hook_seconds[event] = self.gate.hook_seconds.get(event, 0.0) + perf_counter() - started

    def _settle(self) -> None:
        """Between two steps nothing is half done (an engine call may have failed in the middle)."""
        self._leaving = self._claiming = None
        self._given, self._claims = [], []

    def _name_owners(self, output: Any) -> None:
        """Fills in whose the blocks are that were handed out in this step, and for which group."""
        if not self._given:
            return
        owners: dict[int, tuple[int, int]] = {}
        claimed: dict[int, set[int]] = {}
        for _, pages, _, handle in self._claims:
            claimed.setdefault(handle, set()).update(pages)
        fresh = [(new.req_id, new.block_ids) for new in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        fresh += zip(cached.req_ids, cached.new_block_ids, strict=True)
        for request_id, tables in fresh:
            if tables is not None:
                handle = self._requests.meet(self._scheduler.requests[request_id]).handle
                shared = claimed.get(handle, ())
                for place, pages in enumerate(tables):
                    owners.update({page: (handle, place) for page in pages if page not in shared})
        for event in self._given:
            by_owner: dict[tuple[int, int], list[int]] = {}
            for page in event[1]:
                by_owner.setdefault(owners.get(page, (0, 0)), []).append(page)
            event[1:] = [[(pages, handle, place) for (handle, place), pages in by_owner.items()]]

    def _tell_writes(self, scheduled: dict[str, int]) -> None:
        """What this step writes. A token in the middle of a block that its request has begun tells nothing new."""
        pages: list[int] = []
        owners: list[int] = []
        sealed = [group for group in self._groups if group.mode.sealed]
        smallest = self._sizes[0] if len(self._sizes) == 1 else 1
        requests = self._scheduler.requests
        for request_id, count in scheduled.items():
            request = requests[request_id]
            stop = request.num_computed_tokens  # the scheduler has counted this step already
            if count == 1 and stop % smallest > 1:
                continue
            start = stop - count
            live = self._requests.meet(request)
            for group in sealed:
                size = group.manager.block_size
                if count == 1 and stop % size > 1:
                    continue
                table = group.manager.req_to_blocks.get(request_id, ())
                written = pages_of(table[start // size : -(-stop // size)])
                pages += written
                owners += [live.handle] * len(written)
        if pages:
            self._events.append(("write", pages, owners))

    def _ending(self, request: Any) -> None:
        live = self._requests.live.get(request.request_id)
        if live is not None:
            self._seal_complete((live,))
        self._leaving = live

    def _ended(self, token: None, result: Any, request: Any) -> None:
        live, self._leaving = self._leaving, None
        if live is not None:
            self._requests.leave(live)

    def _blocks_given(self, token: None, result: list[Any], *args: Any, **kwargs: Any) -> None:
        if result:
            event: list[Any] = ["allocate", pages_of(result)]
            self._given.append(event)
            self._events.append(event)

    def _blocks_touched(self, blocks: Sequence[Any]) -> None:
        pages = pages_of(blocks)
        if not pages:
            return
        identities = [UNKNOWN_IDENTITY] * len(pages)
        handle = 0
        if self._claiming is not None:
            live, group, first = self._claiming
            handle = live.handle
            if group.mode.sealed:
                chain = self._requests.extend(live, group.manager.block_size, first + len(blocks))
                if chain.identities:
                    identities = [
                        group.identity(chain.identities[index])
                        for index, block in enumerate(blocks, first)
                        if not block.is_null
                    ]
        self._claims.append(("claim", pages, identities, handle))

    def _blocks_freed(self, blocks: list[Any]) -> None:
        """A block that is still in the prefix cache stays sealed: a hit may revive it at any time."""
        own = [block for block in blocks if block.pool is None or block.pool is self._pool]
        if pages := pages_of(own):
            self._events.append(("release", pages, self._leaving.handle if self._leaving is not None else 0))
        self._free(block for block in own if block.ref_cnt == 0 and block.block_hash is None)

    def _free(self, blocks: Iterable[Any]) -> None:
        if pages := list(dict.fromkeys(pages_of(list(blocks)))):
            self._events.append(("free", pages))

    def _evicting(self, block_ids: Iterable[int]) -> list[Any]:
        return [self._pool.blocks[number] for number in block_ids if self._pool.blocks[number].block_hash is not None]

    def _evicted(self, cached: list[Any] | None, result: Any, block_ids: Iterable[int]) -> None:
        self._free(block for block in cached or () if block.ref_cnt == 0 and block.block_hash is None)

    def _resetting(self) -> list[Any]:
        return [block for block in self._pool.blocks if block.block_hash is not None]

    def _reset(self, cached: list[Any] | None, result: bool) -> None:
        if result:
            self._evicted(cached, result, ())


def _merged(events: list[Event]) -> list[Event]:
    """Neighbouring events of one kind (and group, if they are adoptions) put together."""
    merged: list[Event] = []
    for event in events:
        last: Event = merged[-1] if merged else ("",)
        if event[0] != last[0] or (event[0] == "adopt" and event[5] != last[5]):
            merged.append(event)
        elif event[0] == "adopt":
            for mine, more in zip(last[1:5], event[1:5], strict=True):
                mine.extend(more)
        else:
            last[1].extend(event[1])
    return merged
