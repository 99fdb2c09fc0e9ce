"""`kv-canary bench`: its grammar, its progress bar, and what it prints. The measuring is in `kv_canary.bench`.

It asks no server, so it stands beside the commands that do. torch is imported when the arguments are right.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from kv_canary.cli.parser import Parser, UsageError
from kv_canary.cli.render import Style, bar
from kv_canary.cli.session import CLEAN, Surroundings
from kv_canary.errors import SettingsError
from kv_canary.settings import parse_budget

if TYPE_CHECKING:
    from kv_canary.bench.program import Options

EPILOG = """\
Without --preset, --hooks, --scale or --engine the bandwidth of all presets is measured; with some of them, only those.
Figures are medians of passes that take turns with the memory's own limit on the same bytes.
exit status: 0 measured; 2 wrong use, or not possible here
"""
_DRAW_SECONDS = 0.1
_MAXIMUM_REPEATS = 1000


def run_bench(arguments: Sequence[str], surroundings: Surroundings) -> int:
    """Measures and prints. Raises `KVCanaryError` for wrong use and for what is not possible here."""
    given = _grammar().parse_args(arguments)
    options = _options(given)
    from kv_canary.bench.plots import check_plots, draw_plots
    from kv_canary.bench.program import run
    from kv_canary.cli.bench_screen import bench_screen

    if options.plots is not None:
        check_plots(options.plots)
    meter = TerminalMeter(surroundings.stderr)
    try:
        document = run(options, meter)
    finally:
        meter.close()
    drawn = draw_plots(document, options.plots) if options.plots is not None else []
    if given.json:
        print(json.dumps(document, indent=2), file=surroundings.stdout)
    else:
        lines = bench_screen(document, Style.of(surroundings.stdout, surroundings.environment))
        print(*lines, *(f"plot: {path}" for path in drawn), sep="\n", file=surroundings.stdout)
    surroundings.stdout.flush()
    return CLEAN


def _grammar() -> argparse.ArgumentParser:
    parser = Parser(
        prog="kv-canary bench",
        description="Measures on this machine how fast KV pages are verified, and what that costs an engine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--preset", action="append", metavar="NAME", help="only this pool (may be repeated); a wrong name lists them"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if there is one"
    )
    parser.add_argument("--size", metavar="SIZE", help="bytes of the pool, such as 512MB (1GB; on a GPU 16GB)")
    parser.add_argument("--threads", type=_count(256), default=1, metavar="N", help="threads that read (1)")
    parser.add_argument(
        "--repeat", type=_count(_MAXIMUM_REPEATS), metavar="N", help="rounds (bandwidth 15, scale 3, engine 12)"
    )
    parser.add_argument("--hooks", action="store_true", help="microseconds a step on the engine's thread")
    parser.add_argument("--scale", action="store_true", help="pools from 1 to 16 GB (on a GPU to 100 GB)")
    parser.add_argument("--engine", metavar="NAME", help="tokens a second, canary off and on: transformers, vllm")
    parser.add_argument(
        "--budget", action="append", metavar="B", help="with --engine: this read budget (may be repeated; 1%%)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, for programs")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw what was measured into this folder, as PNG")
    return parser


def _options(given: argparse.Namespace) -> Options:
    from kv_canary.bench.memory import parse_size
    from kv_canary.bench.presets import PRESETS, ROW_SWEEP
    from kv_canary.bench.program import Options

    if given.budget and not given.engine:
        raise UsageError("--budget goes with --engine\nfor example: kv-canary bench --engine transformers --budget 5%")
    budgets = tuple(parse_budget("--budget", text) for text in given.budget or ())
    for budget, text in zip(budgets, given.budget or (), strict=True):
        if budget.is_off:
            raise SettingsError("--budget", text, "a rate or a share: the engine is measured without the canary anyway")
    options = Options(
        presets=None if given.preset is None else tuple(dict.fromkeys(given.preset)),
        device=given.device,
        size_bytes=None if given.size is None else parse_size(given.size),
        threads=given.threads,
        repeats=given.repeat,
        hooks=given.hooks,
        scale=given.scale,
        engine=given.engine,
        budgets=budgets,
        plots=given.plots,
    )
    if options.plots is not None and options.bandwidth and options.presets is None:
        # the plot of bandwidth by row size wants more row sizes than the presets have
        return _replace(options, presets=(*PRESETS, *ROW_SWEEP))
    return options


def _replace(options: Options, *, presets: tuple[str, ...]) -> Options:
    from dataclasses import replace

    return replace(options, presets=presets)


def _count(limit: int) -> type[int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and 0 < int(text) <= limit):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {limit}")
        return int(text)

    return parse  # type: ignore[return-value]


class TerminalMeter:
    """One line on stderr that is rewritten in place, when a person watches; else nothing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._label = ""
        self._units, self._done = 1, 0.0
        self._drawn = 0
        self._drawn_at = 0.0

    def expect(self, units: int) -> None:
        self._units = max(1, units)

    def begin(self, label: str) -> None:
        self._label = label
        self._draw()

    def advance(self, units: float = 1) -> None:
        self._done += units
        if time.monotonic() - self._drawn_at > _DRAW_SECONDS:
            self._draw()

    def close(self) -> None:
        if self._drawn:
            self._stream.write("\r" + " " * self._drawn + "\r")
            self._stream.flush()

    def _draw(self) -> None:
        if not self._terminal:
            return
        line = f"{bar(self._done / self._units, 30)} {self._label}"
        self._stream.write("\r" + line.ljust(self._drawn))
        self._stream.flush()
        self._drawn = max(self._drawn, len(line))
        self._drawn_at = time.monotonic()
