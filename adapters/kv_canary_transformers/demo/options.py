"""The demo's command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from kv_canary.errors import SettingsError
from kv_canary.settings import Settings, parse_budget

MINIMUM_PAGES = 32  # one request of the traffic needs up to 15, and two must fit beside the scheduler's margin


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for, checked."""

    seconds: float
    device: str
    pages: int
    seed: int
    ready_file: Path | None
    summary: Path | None
    settings: Settings


def parse(arguments: list[str]) -> Options:
    """Exits with status 2 and one clear line for a bad value, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="kv-canary demo",
        description="Runs a real continuous-batching engine with a small random Llama (built locally, nothing is "
        "downloaded), drives traffic that shares prefixes, forks, cancels and recycles pages all the time, and guards "
        "its KV cache. Content drills are allowed here. Other settings come from KV_CANARY_* as always.",
    )
    parser.add_argument(
        "--seconds", type=float, default=0.0, metavar="N", help="stop after N seconds (default: run on)"
    )
    parser.add_argument(
        "--port", metavar="P", help="port of the HTTP API (default: KV_CANARY_PORT, else 10470; 0: any)"
    )
    parser.add_argument("--host", metavar="H", help="address of the HTTP API (default: KV_CANARY_HOST, else 127.0.0.1)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if there is one"
    )
    parser.add_argument(
        "--pages", type=int, default=256, metavar="N", help="pages of the KV cache, 16 tokens each (256)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of model, traffic and drills (0)")
    parser.add_argument("--budget", metavar="B", help="read budget of background sweeps, such as 1%%, 2GB/s or off")
    parser.add_argument(
        "--ready-file", type=Path, metavar="FILE", help='write {"url", "pid"} here once pages are verified'
    )
    parser.add_argument("--summary", type=Path, metavar="FILE", help="write what happened here at the end, as JSON")
    given = parser.parse_args(arguments)
    if not 0 <= given.seconds < 1e9:
        parser.error(f"--seconds: {given.seconds:g} is not allowed; give a number from 0 (run on) up")
    if given.pages < MINIMUM_PAGES:
        parser.error(f"--pages: {given.pages} is not allowed; the traffic needs at least {MINIMUM_PAGES}")
    for option, path in (("--ready-file", given.ready_file), ("--summary", given.summary)):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{option}: the folder {path.absolute().parent} does not exist")
    try:
        settings = replace(Settings.from_environment(), enabled=True, allow_content_drills=True)
        changes = {key: getattr(given, key) for key in ("port", "host") if getattr(given, key) is not None}
        settings = Settings.from_mapping(changes, base=settings, label="--")
        if given.budget is not None:
            settings = replace(settings, budget=parse_budget("--budget", given.budget))
    except SettingsError as error:
        parser.error(str(error))
    return Options(
        seconds=given.seconds,
        device=_device(parser, given.device),
        pages=given.pages,
        seed=given.seed,
        ready_file=given.ready_file,
        summary=given.summary,
        settings=settings,
    )


def _device(parser: argparse.ArgumentParser, wanted: str) -> str:
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda is not available here; use --device cpu (or auto)")
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted
