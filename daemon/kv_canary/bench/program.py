"""One run of the bench, from options to a document. On its caller's thread; torch's settings are left as they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from kv_canary.bench.bandwidth import measure_bandwidth
from kv_canary.bench.engines import EngineRequest, find_engine
from kv_canary.bench.hooks import SEQUENCES, STEPS, measure_hooks
from kv_canary.bench.machine import describe_machine
from kv_canary.bench.memory import check_fits, choose_device, random_memory
from kv_canary.bench.presets import PRESETS, Preset, find_preset
from kv_canary.bench.scale import measure_scale, pool_sizes
from kv_canary.settings import Budget, Settings

BANDWIDTH_REPEATS = 15
ENGINE_REPEATS = 12
SCALE_REPEATS = 3
SCALE_PRESET = "llama-8b"
DEFAULT_BYTES = {"cpu": 10**9, "cuda": 16 * 10**9}  # a launch on a GPU reads some GB


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for. `presets` and `repeats` None: the default ones."""

    presets: tuple[str, ...] | None = None
    device: str = "auto"
    size_bytes: int | None = None
    threads: int = 1
    repeats: int | None = None
    hooks: bool = False
    scale: bool = False
    engine: str | None = None
    budgets: tuple[Budget, ...] = ()
    hook_steps: int = STEPS
    plots: Path | None = None

    @property
    def bandwidth(self) -> bool:
        """The bandwidth part runs when it is asked for, or nothing else is."""
        return self.presets is not None or not (self.hooks or self.scale or self.engine)


class Meter(Protocol):
    """Is told how far a run is: how many units there are, what is being done, and that units are done."""

    def expect(self, units: int) -> None: ...

    def begin(self, label: str) -> None: ...

    def advance(self, units: float = 1) -> None: ...


def run(options: Options, meter: Meter) -> dict[str, Any]:
    """Measures; raises `KVCanaryError` for what cannot be done here before anything is measured."""
    threads_before = torch.get_num_threads()
    device = choose_device(options.device)
    size = options.size_bytes or DEFAULT_BYTES[device.type]
    presets = [find_preset(name) for name in options.presets or tuple(PRESETS)]
    engine = find_engine(options.engine) if options.engine else None
    if options.bandwidth:
        check_fits(size, device)
        for preset in presets:
            preset.pages_in(size)
    parts: list[tuple[str, int, Callable[[], Any]]] = []
    if options.bandwidth:
        repeats = options.repeats or BANDWIDTH_REPEATS
        parts.append(
            ("bandwidth", len(presets) * repeats, lambda: _bandwidth(presets, device, size, repeats, options, meter))
        )
    if options.hooks:
        units = 2 * len(SEQUENCES) * (options.hook_steps // 100)
        parts.append(("hooks", units, lambda: _hooks(device, options, meter)))
    if options.scale:
        sizes, rounds = pool_sizes(device), options.repeats or SCALE_REPEATS
        parts.append(("scale", len(sizes) * (rounds + 1), lambda: _scale(device, sizes, rounds, options, meter)))
    if engine is not None:
        budgets = options.budgets or (Settings().budget,)
        request = EngineRequest(
            device=device.type,
            budgets=budgets,
            repeats=options.repeats or ENGINE_REPEATS,
            each_part=meter.advance,
        )
        units = request.repeats * (1 + len(budgets))
        parts.append(("engine", units, lambda: _engine(options.engine or "", engine, request, meter)))
    meter.expect(sum(units for _, units, _ in parts))
    document: dict[str, Any] = {"version": 1, "machine": describe_machine(device)}
    try:
        for name, _, measure in parts:
            document[name] = measure()
    finally:
        torch.set_num_threads(threads_before)
    return document


def _bandwidth(
    presets: list[Preset], device: torch.device, size: int, repeats: int, options: Options, meter: Meter
) -> list[dict[str, Any]]:
    meter.begin("filling memory")
    memory = random_memory(size, device)
    rows = []
    for preset in presets:
        meter.begin(preset.name)
        row = measure_bandwidth(preset, memory, threads=options.threads, repeats=repeats, each_round=meter.advance)
        rows.append(row.as_document())
    return rows


def _hooks(device: torch.device, options: Options, meter: Meter) -> list[dict[str, Any]]:
    rows = []
    for sequences in SEQUENCES:
        for kind, where in (("host", torch.device("cpu")), ("tensor", device)):
            meter.begin(f"hooks, {kind} ledger, {sequences} sequences")
            row = measure_hooks(
                "host" if kind == "host" else "tensor",
                sequences=sequences,
                device=where,
                steps=options.hook_steps,
                each_hundred=meter.advance,
            )
            rows.append(row.as_document())
    return rows


def _scale(device: torch.device, sizes: list[int], rounds: int, options: Options, meter: Meter) -> list[dict[str, Any]]:
    meter.begin(f"scale, up to {max(sizes) / 1e9:.0f} GB")
    rows = measure_scale(
        find_preset(SCALE_PRESET), device, sizes, threads=options.threads, repeats=rounds, each_round=meter.advance
    )
    return [row.as_document() for row in rows]


def _engine(
    name: str, measure: Callable[[EngineRequest], dict[str, Any]], request: EngineRequest, meter: Meter
) -> dict[str, Any]:
    meter.begin(f"engine {name}")
    return measure(request)
