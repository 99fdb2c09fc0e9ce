"""The engine part of `kv-canary faults`: what of the catalogue can be produced on a real continuous-batching engine.

Bytes are changed, and tables broken, between two steps of the engine, behind its back and behind ours. Every fault has
an engine of its own over the same random model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kv_canary.errors import KVCanaryError
from kv_canary.faults.results import FaultRequest, Result, attempted, judged
from kv_canary.settings import Settings
from kv_canary.sidecar import Sidecar
from kv_canary.snapshot import Check, Incident
from kv_canary_transformers.attach import attach
from kv_canary_transformers.demo.engine import PAGE_TOKENS, build_manager, build_model
from kv_canary_transformers.demo.traffic import Traffic

ENGINE = "transformers"
PAGES = 96
PATIENCE_SECONDS = 20.0

Inject = Callable[["Guarded"], set[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFault:
    """`inject` spoils pages of a guarded engine that has served some prompts; it returns them."""

    name: str
    title: str
    checks: tuple[Check, ...]
    inject: Inject
    cause: str = ""
    offload: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineControl:
    """`run` gives the alarms, of which there must be none, and what else was not as it should be."""

    name: str
    title: str
    run: Callable[[Any, int], tuple[list[Incident], str]]


class Guarded:
    """A manager and its sidecar."""

    def __init__(
        self,
        model: Any,
        *,
        pages: int = PAGES,
        guarded: bool = True,
        offload: bool = False,
        seed: int = 0,
        settings: Settings | None = None,
    ) -> None:
        """With the default settings, unless others are given: what is found is found within the default budget."""
        options: dict[str, Any] = {"cpu_offload_space": 0.05} if offload else {}
        self._undo = _without_pinned_memory() if offload and not torch.cuda.is_available() else lambda: None
        self.manager = build_manager(model, pages=pages, **options)
        settings = settings or Settings(enabled=True)
        self.sidecar: Sidecar | None = attach(self.manager, settings, serve=False, seed=seed) if guarded else None
        self.manager.start()

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int = 24) -> list[list[int]]:
        for index, prompt in enumerate(prompts):
            self.manager.add_request(list(prompt), request_id=f"r{index}", max_new_tokens=new_tokens)
        answers: dict[str, list[int]] = {}
        until = time.monotonic() + 120
        while len(answers) < len(prompts):
            result = self.manager.get_result(timeout=0.5)
            if result is not None and result.is_finished():
                answers[result.request_id] = list(result.generated_tokens)
            elif time.monotonic() > until or not self.manager.is_running():
                raise KVCanaryError(f"the engine did not finish: {self.manager.background_thread_status.fatal_error}")
        return [answers[f"r{index}"] for index in range(len(prompts))]

    @property
    def allocator(self) -> Any:
        return self.manager.batch_processor.cache.cache_allocators["full_attention"]

    @property
    def blocks(self) -> torch.Tensor:
        """uint8 [blocks, bytes of one]."""
        blocks: torch.Tensor = self.allocator._copy_view
        return blocks

    @property
    def cached(self) -> list[int]:
        """Complete blocks that wait in the prefix cache."""
        return list(self.allocator.ledger.cached_blocks)

    @property
    def free(self) -> list[int]:
        trees = self.allocator.pool._free_blocks[self.allocator.index].trees
        return [block for leaves in trees.values() for block in leaves]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No step runs inside, and every fingerprint is taken: the engine's thread waits before its next step."""
        processor = self.manager.batch_processor
        reached, go_on = threading.Event(), threading.Event()
        original = processor.prepare_next_batch

        def wait_here() -> Any:
            reached.set()
            go_on.wait(60)
            return original()

        processor.prepare_next_batch = wait_here
        if not reached.wait(30):
            raise KVCanaryError("the engine does not come to a step boundary")
        try:
            if self.sidecar is not None:
                self.sidecar.settle()
            yield
        finally:
            processor.prepare_next_batch = original
            go_on.set()

    def incidents(self) -> list[Incident]:
        if self.sidecar is None:
            return []
        return [one for one in self.sidecar.settle().incidents if one.source == "real"]

    def close(self) -> None:
        if self.manager.is_running():
            self.manager.stop(block=True, timeout=30, hard_stop=True, keep_for_next_session=False)
        if self.sidecar is not None:
            self.sidecar.detach()
        self._undo()


def _without_pinned_memory() -> Callable[[], None]:
    """The swap pool wants pinned memory, which a machine without an accelerator has not. Returns what undoes it."""
    from transformers.generation.continuous_batching import offloading_manager

    class Unpinned:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.empty(*args, **kwargs | {"pin_memory": False})

    original, offloading_manager.torch = offloading_manager.torch, Unpinned()

    def undo() -> None:
        offloading_manager.torch = original

    return undo


def run(request: FaultRequest) -> None:
    """Produces each wanted fault and control, and tells its result."""
    torch.set_num_threads(1)
    model = build_model(seed=request.seed)
    for fault in FAULTS:
        if request.wanted(fault.name):
            request.begin(fault.name)
            work = partial(_fault, fault, model, request.seed)
            request.each(attempted(work, fault, ENGINE, expected=fault.checks))
    for control in CONTROLS:
        if request.wanted(control.name):
            request.begin(control.name)
            request.each(attempted(partial(_control, control, model, request.seed), control, ENGINE))


def prompts(count: int = 6) -> list[list[int]]:
    """Over three shared prefixes of three pages."""
    return [
        [3 + (i % 3 * 50 + j) % 400 for j in range(3 * PAGE_TOKENS)] + [3 + (i * 17 + j * 5) % 400 for j in range(20)]
        for i in range(count)
    ]


def _fault(fault: EngineFault, model: Any, seed: int) -> Result:
    engine = Guarded(model, offload=fault.offload, pages=24 if fault.offload else PAGES, seed=seed)
    try:
        engine.generate(prompts())
        before = len(engine.incidents())
        pages = fault.inject(engine)
        began = time.monotonic()
        assert engine.sidecar is not None
        sidecar = engine.sidecar

        def is_caught() -> bool:
            return any(
                one.check in fault.checks and pages & {one.page, *one.neighbours}
                for one in sidecar.snapshot().incidents
                if one.source == "real"
            )

        while not is_caught() and time.monotonic() - began < PATIENCE_SECONDS:
            time.sleep(0.002)
        seconds = time.monotonic() - began
        return judged(
            fault.name,
            fault.title,
            ENGINE,
            expected=fault.checks,
            cause=fault.cause,
            pages=pages if not before else set(),
            incidents=engine.incidents(),
            seconds=round(seconds, 4),
        )
    finally:
        engine.close()


def _spoil(change: Callable[[torch.Tensor], None], *, free: bool = False) -> Inject:
    def inject(engine: Guarded) -> set[int]:
        with engine.paused():
            block = (engine.free if free else engine.cached)[-1]
            change(engine.blocks[block])
        return {block}

    return inject


def _flip(block: torch.Tensor) -> None:
    block[len(block) // 3] ^= 4


def _burst(block: torch.Tensor) -> None:
    block[1000:1032] ^= 0x5A


def _zero_row(block: torch.Tensor) -> None:
    row = _row_bytes(block)
    block[3 * row : 4 * row] = 0


def _trade_rows(block: torch.Tensor) -> None:
    row = _row_bytes(block)
    kept = block[:row].clone()
    block[:row] = block[5 * row : 6 * row]
    block[5 * row : 6 * row] = kept


def _not_a_number(block: torch.Tensor) -> None:
    row = _row_bytes(block)
    block[2 * row : 2 * row + 8] = torch.tensor([0, 0, 0xC0, 0x7F] * 2, dtype=torch.uint8)


def _row_bytes(block: torch.Tensor) -> int:
    return len(block) // (4 * 2 * PAGE_TOKENS)  # layers, K and V, tokens


def _late_write(block: torch.Tensor) -> None:
    row = _row_bytes(block)
    block[: 2 * row] ^= 0x3C


def _copy_over(engine: Guarded) -> set[int]:
    with engine.paused():
        source, target = engine.cached[:2]
        engine.blocks[target] = engine.blocks[source]
    return {target}


def _double_free(engine: Guarded) -> set[int]:
    with engine.paused():
        trees = engine.allocator.pool._free_blocks[engine.allocator.index]
        if not any(trees.trees.values()):
            engine.allocator.pool.allocate_sector(engine.allocator.index)
        root, leaves = next((root, leaves) for root, leaves in trees.trees.items() if leaves)
        trees.trees[root] = [*leaves, leaves[-1]]
        trees._length += 1
    engine.manager.add_request([7] * 40, request_id="double", max_new_tokens=8)
    return {leaves[-1]}


def _phantom_hit(engine: Guarded) -> set[int]:
    with engine.paused():
        ledger = engine.allocator.ledger
        block = next(iter(ledger.hash_to_block.values()))
        ledger.hash_to_block = dict.fromkeys(ledger.hash_to_block, block)
    engine.manager.add_request(prompts(3)[2], request_id="reader", max_new_tokens=4)
    return {block}


def _swap_pool_damaged(engine: Guarded) -> set[int]:
    """The swap pool's copies are damaged while they wait; whatever comes back from there is wrong."""
    manager, space = engine.manager, engine.manager.batch_processor.offloading_manager
    coming = space.restore_scheduled_requests
    pages: set[int] = set()

    def damage_and_restore(requests_in_batch: list[Any]) -> Any:
        for future in requests_in_batch:
            state = future.state
            if state.is_cpu_offloaded and not pages:
                copies = space._request_id_to_cpu_blocks[state.request_id]["full_attention"]
                whole = state.position_offset // PAGE_TOKENS
                if whole:
                    space._cpu_views["full_attention"][copies[0], 77:80] ^= 0x5A
                    pages.add(engine.allocator.block_table[state.request_id][0])
        return coming(requests_in_batch)

    with engine.paused():
        space.restore_scheduled_requests = damage_and_restore
    for index in range(12):
        tokens = [3 + (index * 31 + place * 7) % 400 for place in range(60)]
        manager.add_request(tokens, request_id=f"big{index}", max_new_tokens=80)
    until = time.monotonic() + 60
    while not pages and time.monotonic() < until:
        time.sleep(0.01)
    return pages


FAULTS: tuple[EngineFault, ...] = (
    EngineFault(
        name="F1",
        title="a late kernel writes a complete block that waits in the prefix cache",
        checks=("content",),
        inject=_spoil(_late_write),
    ),
    EngineFault(
        name="F2 free",
        title="a late kernel writes a block that was freed",
        checks=("free_page",),
        inject=_spoil(_late_write, free=True),
        cause="written after it was freed",
    ),
    EngineFault(
        name="F4",
        title="what comes back from the CPU swap pool is not what left",
        checks=("transfer",),
        inject=_swap_pool_damaged,
        offload=True,
    ),
    EngineFault(
        name="F7",
        title="double free: one block twice in the free list, so it gets two owners",
        checks=("ownership",),
        inject=_double_free,
        cause="two owners",
    ),
    EngineFault(
        name="F11",
        title="phantom prefix hit: the hash map points at a block of other tokens",
        checks=("identity",),
        inject=_phantom_hit,
    ),
    *(
        EngineFault(name=f"F13 {short}", title=title, checks=("content",), inject=inject, cause=cause)
        for short, title, inject, cause in (
            ("bit", "one bit flips", _spoil(_flip), "bit flip: one bit"),
            ("burst", "a burst of 32 bytes", _spoil(_burst), "unknown"),
            ("zero row", "a token's row is zeroed", _spoil(_zero_row), "zeros in row 3 of layer.0.k"),
            ("rows", "two rows trade places", _spoil(_trade_rows), "unknown"),
            ("NaN", "two numbers become NaN", _spoil(_not_a_number), "NaN"),
            ("copy", "a block is copied over another", _copy_over, "misdirected copy"),
        )
    ),
)


def _control(control: EngineControl, model: Any, seed: int) -> Result:
    alarms, problem = control.run(model, seed)
    return Result(
        fault=control.name,
        title=control.title,
        engine=ENGINE,
        expected=(),
        caught=None,
        check=None,
        persistence=None,
        cause_guess=None,
        seconds=None,
        false_alarms=sum(one.pages_total for one in alarms),
        problem=problem or (alarms[0].summary if alarms else ""),
    )


def _pressure(model: Any, seed: int, *, pages: int = 48, offload: bool = False) -> tuple[list[Incident], str]:
    engine = Guarded(model, pages=pages, offload=offload, seed=seed)
    try:
        traffic, until = Traffic(engine.manager, pages=pages, seed=seed), time.monotonic() + 120
        while traffic.requests_finished < 60 and time.monotonic() < until:
            traffic.pump()
        alarms = engine.incidents()
        assert engine.sidecar is not None
        counters = engine.sidecar.snapshot().groups[0].counters
        problem = "" if traffic.requests_finished >= 60 else "the engine did not finish its requests"
        if not counters.verified_pages:
            problem = "nothing was verified"
        if offload and not counters.transfers["verified"]:
            problem = "nothing came back from the CPU"
        return alarms, problem or "; ".join(engine.sidecar.snapshot().last_errors)
    finally:
        engine.close()


def _same_tokens(model: Any, seed: int) -> tuple[list[Incident], str]:
    answers, alarms = [], []
    for guarded in (False, True):
        engine = Guarded(model, guarded=guarded, seed=seed)
        try:
            answers.append(engine.generate(prompts(8), new_tokens=32))
            alarms = engine.incidents()
        finally:
            engine.close()
    return alarms, "" if answers[0] == answers[1] else "the tokens are others than without the canary"


CONTROLS: tuple[EngineControl, ...] = (
    EngineControl(
        name="C1",
        title="traffic of every kind on a pool that is too small: prefixes, forks, cancels, chunks, eviction",
        run=_pressure,
    ),
    EngineControl(
        name="C11",
        title="the same, with the CPU swap pool",
        run=lambda model, seed: _pressure(model, seed, pages=24, offload=True),
    ),
    EngineControl(name="C13", title="the tokens are the same with the canary as without", run=_same_tokens),
)
