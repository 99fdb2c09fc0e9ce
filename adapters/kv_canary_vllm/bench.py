"""The engine part of `kv-canary bench --engine vllm`: a vLLM engine with the canary off and on, taking turns.

Each run is a process of its own, as a server would be: off means that no hook is installed, and vLLM takes one engine a
process. The model is a small random Llama whose configuration is written to a temporary folder; prompts, their order
and greedy decoding are the same in all runs. A step's time is that from one `schedule` to the next.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kv_canary.bench.engine_runs import Run, against, side
from kv_canary.bench.engines import EngineRequest
from kv_canary.errors import KVCanaryError
from kv_canary.settings import Budget

REQUESTS = 32
SEQUENCES = 16
PROMPT_TOKENS = (16, 120)
VOCABULARY = 256
BLOCK_TOKENS = 32
_LIMIT_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model, and how many tokens each request gets."""

    name: str
    new_tokens: int
    config: dict[str, int]


SIZES = (
    Size(
        name="tiny",
        new_tokens=96,
        config={"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    Size(
        name="small",
        new_tokens=32,
        config={"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12},
    ),
)


def measure(request: EngineRequest) -> dict[str, Any]:
    """Runs off, on, off, on ... for each size of model, and returns the document of the engine part."""
    import vllm

    with tempfile.TemporaryDirectory(prefix="kv-canary-bench-") as folder:
        return {
            "engine": "vllm",
            "engine_version": vllm.__version__,
            "device": request.device,
            "engine_threads": _threads(),
            "requests": REQUESTS,
            "repeats": request.repeats,
            "models": [_measure_size(size, Path(folder) / size.name, request) for size in SIZES],
        }


def _measure_size(size: Size, folder: Path, request: EngineRequest) -> dict[str, Any]:
    parameters = _write_model(size, folder)
    variants: list[Budget | None] = [None, *request.budgets]
    runs: dict[int, list[Run]] = {index: [] for index in range(len(variants))}
    for _ in range(request.repeats):
        for index, variant in enumerate(variants):
            runs[index].append(_run_in_a_process(size, folder, variant))
            request.each_part(1 / len(SIZES))
    return {
        "model": size.name,
        "parameters": parameters,
        "new_tokens": size.new_tokens,
        "off": side(runs[0]),
        "on": [
            {"budget": str(budget), **side(runs[index]), **against(runs[index], runs[0])}
            for index, budget in enumerate(request.budgets, start=1)
        ],
    }


def _write_model(size: Size, folder: Path) -> int:
    """Writes the configuration of a random Llama; returns how many parameters it will have."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **size.config,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    hidden, middle, heads = (size.config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    layer = 2 * hidden * 64 * (heads + 4) + 3 * hidden * middle
    return size.config["num_hidden_layers"] * layer + 2 * VOCABULARY * hidden


def _threads() -> int:
    """One core is left for the canary, as a server would leave it."""
    return max(1, (os.cpu_count() or 1) - 1)


def _run_in_a_process(size: Size, folder: Path, budget: Budget | None) -> Run:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KV_CANARY")}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(_threads()),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if budget is not None:
        environment |= {"KV_CANARY": "on", "KV_CANARY_PORT": "0", "KV_CANARY_BUDGET": str(budget)}
    done = subprocess.run(  # noqa: S603 - our own module
        [sys.executable, "-m", __name__, str(folder), str(size.new_tokens)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_LIMIT_SECONDS,
        check=False,
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not told:
        raise KVCanaryError(f"the vLLM engine did not finish: {done.stderr[-2000:]}")
    run = json.loads(told[-1])
    if (budget is not None) != run.pop("guarded"):
        raise KVCanaryError(f"the vLLM engine was not guarded as asked for: {done.stderr[-2000:]}")
    return Run(**{**run, "step_seconds": tuple(run["step_seconds"])})


def make_prompts(seed: int = 0) -> list[list[int]]:
    """Half of them share a prefix of two blocks with others."""
    choose = random.Random(seed)
    heads = [[choose.randrange(3, VOCABULARY) for _ in range(2 * BLOCK_TOKENS)] for _ in range(REQUESTS // 8)]
    tails = [[choose.randrange(3, VOCABULARY) for _ in range(choose.randint(*PROMPT_TOKENS))] for _ in range(REQUESTS)]
    return [heads[index // 8] + tail if index % 2 else tail for index, tail in enumerate(tails)]


def _run(folder: Path, new_tokens: int) -> dict[str, Any]:
    """One run, in this process."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=64 << 20,
        block_size=BLOCK_TOKENS,
        disable_log_stats=True,
        seed=0,
    )
    core: Any = llm.llm_engine.engine_core
    scheduler, wrapper = core.engine_core.scheduler, core.engine_core.model_executor.driver_worker
    guard = vars(wrapper).get("_kv_canary")
    marks: list[float] = []
    original = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        marks.append(time.perf_counter())
        return original(*args, **kwargs)

    scheduler.schedule = schedule
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False)

    def generate(prompts: list[list[int]]) -> int:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    generate(make_prompts(seed=1)[: 2 * SEQUENCES])
    before = _seen(guard, scheduler)
    marks.clear()
    started = time.perf_counter()
    tokens = generate(make_prompts())
    seconds = time.perf_counter() - started
    steps = [later - mark for mark, later in pairwise(marks)]
    after = _seen(guard, scheduler)
    return {
        "guarded": guard is not None,
        "tokens_per_second": tokens / seconds,
        "step_seconds": steps,
        "hook_seconds_per_step": (after[0] - before[0]) / max(1, len(steps)),
        "read_bytes_per_second": (after[1] - before[1]) / seconds,
        "mismatches": after[2],
    }


def _seen(guard: Any, scheduler: Any) -> tuple[float, int, int]:
    """Seconds in hooks, bytes read and mismatches so far."""
    if guard is None:
        return 0.0, 0, 0
    snapshot = guard.sidecar.settle()
    hooks = sum(scheduler._kv_canary.gate.hook_seconds.values()) + sum(guard.gate.hook_seconds.values())
    read = sum(sum(group.counters.read_bytes.values()) for group in snapshot.groups)
    return hooks, read, sum(sum(group.counters.mismatches.values()) for group in snapshot.groups)


if __name__ == "__main__":
    print("\n" + json.dumps(_run(Path(sys.argv[1]), int(sys.argv[2]))), flush=True)
