"""The scheduler's half on vLLM's real schedulers, with a worker made of a dictionary: every block is a list of tokens.

The worker runs ahead of the scheduler's knowledge as a GPU does (asynchronous scheduling, which vLLM switches off on a
CPU): steps are launched before the results of the ones before are known, so there are ghost steps after an end of
sequence, optimistic counts of drafts, and preemption with work in flight. It knows nothing of our events; they are held
against what it wrote.
"""

from __future__ import annotations

import importlib.util
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kv_canary.identity import Prefix
from kv_canary.ledger import HostLedger

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]

BLOCK_TOKENS = 8
STOP = 7


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1"), ("VLLM_LOGGING_LEVEL", "ERROR")):
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("vllm_test_models", Path(__file__).with_name("models.py"))
    assert spec is not None
    assert spec.loader is not None
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    return models.build_llama(tmp_path_factory.mktemp("model"))


def make_scheduler(model: Path, *, asynchronous: bool, blocks: int, window: int | None, drafts: int) -> Any:
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.structured_output import StructuredOutputManager

    speculation = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3} if drafts else None
    config = EngineArgs(
        model=str(model),
        load_format="dummy",
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=6,
        max_num_batched_tokens=32,
        block_size=32,
        kv_cache_memory_bytes=4 << 20,
        speculative_config=speculation,
    ).create_engine_config()
    config.cache_config.block_size = BLOCK_TOKENS
    config.cache_config.num_gpu_blocks = blocks
    config.scheduler_config.async_scheduling = asynchronous
    common = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
    groups = [KVCacheGroupSpec(layer_names=["full"], kv_cache_spec=FullAttentionSpec(**common))]
    if window:
        spec = SlidingWindowSpec(**common, sliding_window=window)
        groups.append(KVCacheGroupSpec(layer_names=["window"], kv_cache_spec=spec))
    cache = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        kv_cache_layout="LBHNC",
        hash_block_size=BLOCK_TOKENS,
    )
    scheduler_class = AsyncScheduler if asynchronous else Scheduler
    manager = StructuredOutputManager(config)
    return scheduler_class(config, cache, manager, block_size=BLOCK_TOKENS, hash_block_size=BLOCK_TOKENS)


class Worker:
    """Runs steps as soon as they are launched, in order. `memory[page]` is what the slots of a block hold."""

    def __init__(self, scheduler: Any, groups: int, seed: int) -> None:
        self.scheduler = scheduler
        self.random = random.Random(seed)
        self.memory: dict[int, list[int]] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.written: list[int] = []
        self._groups = groups

    def run(self, output: Any) -> Any:
        self.written = []
        for name in output.finished_req_ids:
            self.tables.pop(name, None)
            self.tokens.pop(name, None)
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(pages) for pages in new.block_ids]
            self.tokens[new.req_id] = list(self.scheduler.requests[new.req_id].all_token_ids)
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            fresh = cached.new_block_ids[index]
            starts[name] = cached.num_computed_tokens[index]
            if name in cached.resumed_req_ids:
                self.tables[name] = [list(pages) for pages in fresh]
                known = list(self.scheduler.requests[name].all_token_ids)
                if len(known) > len(self.tokens[name]) or self.scheduler.requests[name].drop_stale_output:
                    self.tokens[name] = known
            elif fresh is not None:
                for table, pages in zip(self.tables[name], fresh, strict=True):
                    table.extend(pages)
        return {name: self._advance(name, starts[name], count, output) for name, count in self._scheduled(output)}

    def _scheduled(self, output: Any) -> list[tuple[str, int]]:
        return list(output.num_scheduled_tokens.items())

    def _advance(self, name: str, start: int, count: int, output: Any) -> list[int]:
        tokens = self.tokens[name]
        drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
        if drafts or start >= len(tokens):
            start = len(tokens) - 1  # the scheduler was optimistic; the device knows where it is
        accepted = self.random.randrange(drafts + 1)
        guessed = [self.random.randrange(3, 40) for _ in range(drafts)]
        for offset in range(count):
            position = start + offset
            token = tokens[position] if position < len(tokens) else guessed[position - len(tokens)]
            self._write(name, position, token)
        if start + count - drafts < len(tokens):
            return []  # a chunk of the prompt
        sampled = [*guessed[:accepted], self.random.choice([STOP, *range(8, 40)])]
        tokens.extend(sampled)
        return sampled

    def _write(self, name: str, position: int, token: int) -> None:
        for table in self.tables[name]:
            if position // BLOCK_TOKENS < len(table) and (page := table[position // BLOCK_TOKENS]):
                self.memory.setdefault(page, [0] * BLOCK_TOKENS)[position % BLOCK_TOKENS] = token
                self.written.append(page)


class Canary:
    """What a worker's guard does, without threads: replays the messages and keeps a copy of every sealed block."""

    def __init__(self, worker: Worker, blocks: int, groups: int) -> None:
        from kv_canary_vllm.wire import Replay

        self.worker = worker
        self.ledger = HostLedger("blocks", blocks, groups=groups)
        self.replay = Replay(self.ledger)
        self.copies: dict[int, tuple[int, list[int]]] = {}
        self.seals = 0
        self.seen = 0

    def before(self, output: Any) -> None:
        message = output.kv_canary
        assert "failed" not in message, message
        self.replay.learn(message.get("names", {}))
        if "tables" in message:
            self.ledger.reset()
            self.replay.apply(message["tables"], lambda: None)
        self.ledger.step(message["step"])
        known = message["tables_at"] if "tables" in message else 0
        self.replay.apply(message["events"][known:], lambda: None)
        self.ledger.catch_up(seconds=10)
        while (work := self.ledger.take_work()) is not None:
            if work.kind in ("seal", "adopt", "free"):
                live = self.ledger.generations(work.pages)
                for page, generation, now in zip(work.pages.tolist(), work.generations.tolist(), live, strict=True):
                    held = self.copies.get(page, (-1, []))[0]
                    if generation == now and generation != held and page in self.worker.memory:
                        self.copies[page] = (generation, list(self.worker.memory[page]))
                        self.seals += work.kind == "seal"
        assert self.ledger.take_violations() == []

    def after(self) -> None:
        """No block with a copy of its present generation may have changed; that is the whole promise."""
        pages = list(self.copies)
        for page, live in zip(pages, self.ledger.generations(_array(pages)).tolist(), strict=True):
            generation, copy = self.copies[page]
            if generation == live:
                self.seen += 1
                assert self.worker.memory[page] == copy, f"block {page} changed although it was sealed or free"


def _array(pages: list[int]) -> Any:
    import numpy as np

    return np.array(pages, np.int64)


def drive(model: Path, *, seed: int, lag: int, window: int | None = None, drafts: int = 0) -> SimpleNamespace:
    """Random traffic; `lag` steps are launched before the results of the first are told to the scheduler."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

    from kv_canary_vllm.scheduler import SchedulerGuard

    blocks, source = 48 if window else 26, random.Random(seed)
    scheduler = make_scheduler(model, asynchronous=lag > 0, blocks=blocks, window=window, drafts=drafts)
    guard = SchedulerGuard(scheduler)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    worker = Worker(scheduler, 2 if window else 1, seed)
    canary = Canary(worker, blocks, 2 if window else 1)
    heads = [[source.randrange(3, 40) for _ in range(length)] for length in (20, 41)]
    flight: deque[tuple[Any, dict[str, list[int]]]] = deque()
    added = 0
    for step in range(400):
        if step < 330 and source.random() < 0.3:
            prompt = source.choice([[], *heads]) + [source.randrange(3, 40) for _ in range(source.randrange(1, 30))]
            sampling = SamplingParams(max_tokens=source.randrange(1, 40), stop_token_ids=[STOP], temperature=0)
            scheduler.add_request(Request(f"r{added}", prompt, sampling, None, block_hasher=hasher))
            added += 1
        if source.random() < 0.03 and scheduler.running:
            victim = source.choice(scheduler.running).request_id
            scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
        if source.random() < 0.01:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        output = scheduler.schedule()
        canary.before(output)
        sampled = worker.run(output)
        canary.after()
        flight.append((output, sampled))
        while len(flight) > lag:
            done, tokens = flight.popleft()
            names = list(tokens)
            scheduler.update_from_output(
                done,
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: index for index, name in enumerate(names)},
                    sampled_token_ids=[tokens[name] for name in names],
                ),
            )
            if drafts and not lag:
                for request in scheduler.running:
                    count = 0 if request.is_prefill_chunk else source.randrange(drafts + 1)
                    request.spec_token_ids = [source.randrange(3, 40) for _ in range(count)]
    guard.remove()
    return SimpleNamespace(
        canary=canary, requests=added, claims=canary.ledger.claims, uncovered=canary.ledger.claims_not_covered
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("lag", "window", "drafts"),
    [(0, None, 0), (1, None, 0), (0, 24, 0), (1, 24, 0), (0, None, 3), (1, None, 3)],
    ids=["plain", "async", "hybrid", "async-hybrid", "drafts", "async-drafts"],
)
def test_a_sealed_block_never_changes_and_no_event_contradicts_another(
    model: Path, seed: int, lag: int, window: int | None, drafts: int
) -> None:
    seen = drive(model, seed=seed, lag=lag, window=window, drafts=drafts)
    assert seen.canary.seals > 100
    assert seen.canary.seen > 2_000
    assert seen.claims > 10
    assert seen.uncovered == 0


def test_an_identity_is_that_of_the_tokens_in_front() -> None:
    """What the events carry can be computed from the tokens alone."""
    from kv_canary_vllm.tokens import salt_of, tokens_between

    tokens = list(range(3, 3 + 4 * BLOCK_TOKENS))
    request = SimpleNamespace(
        all_token_ids=tokens, mm_features=[], prompt_embeds=None, lora_request=None, cache_salt=None
    )
    assert tokens_between(request, 0, len(tokens)) == tokens
    assert salt_of(request) == 0
    image = SimpleNamespace(mm_position=SimpleNamespace(offset=BLOCK_TOKENS, length=3), identifier="cat")
    other = SimpleNamespace(mm_position=SimpleNamespace(offset=BLOCK_TOKENS, length=3), identifier="dog")

    def identities(features: list[Any], **changes: Any) -> list[int]:
        changed = SimpleNamespace(**{**vars(request), "mm_features": features, **changes})
        prefix = Prefix.empty(salt_of(changed) or 0)
        return prefix.extended(tokens_between(changed, 0, len(tokens)), BLOCK_TOKENS)[1].tolist()

    plain, cat, dog = identities([]), identities([image]), identities([other])
    assert plain[0] == cat[0] == dog[0]  # the block in front of the image does not depend on it
    assert len({plain[1], cat[1], dog[1]}) == len({plain[3], cat[3], dog[3]}) == 3
    salted = identities([], cache_salt="tenant-a")
    assert not set(plain) & set(salted)
    adapter = SimpleNamespace(lora_name="a", lora_path="/a")
    assert not set(plain) & set(identities([], lora_request=adapter))
