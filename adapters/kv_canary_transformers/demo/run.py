"""Runs the demo from start to a clean end: engine, canary, traffic, live line, ready file, summary."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import Any

from kv_canary.errors import KVCanaryError
from kv_canary.sidecar import Sidecar
from kv_canary_transformers.attach import attach
from kv_canary_transformers.demo.engine import build_manager, build_model
from kv_canary_transformers.demo.options import Options, parse
from kv_canary_transformers.demo.report import LiveLine, real_mismatches, summary, write_json
from kv_canary_transformers.demo.traffic import Traffic

logger = logging.getLogger("kv_canary")

_STOP_SECONDS = 10.0


def run(arguments: list[str], stop: threading.Event) -> int:
    options = parse(arguments)
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        return _run(options, stop)
    except KVCanaryError as error:
        print(f"kv-canary demo: {error}", file=sys.stderr)
        return 2


def _run(options: Options, stop: threading.Event) -> int:
    import torch

    if options.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))  # one core is left for the canary and the traffic
    print(f"starting the engine (transformers, {options.device}, {options.pages} pages) ...", flush=True)
    model = build_model(device=options.device, seed=options.seed)
    manager = build_manager(model, pages=options.pages)
    sidecar = attach(manager, options.settings, seed=options.seed)
    try:
        manager.start()
        return _drive(options, manager, sidecar, stop)
    finally:
        _stop_engine(manager)
        sidecar.detach()


def _drive(options: Options, manager: Any, sidecar: Sidecar, stop: threading.Event) -> int:
    traffic, line = Traffic(manager, options.pages, options.seed), LiveLine()
    started, ready = time.monotonic(), False
    while not stop.is_set() and (not options.seconds or time.monotonic() - started < options.seconds):
        traffic.pump()
        snapshot = sidecar.snapshot()
        if not manager.is_running():
            error = manager.background_thread_status.fatal_error
            raise KVCanaryError(f"the engine stopped by itself: {error}") from error
        if not ready and any(group.counters.verified_pages for group in snapshot.groups):
            ready = True
            _announce(options, snapshot.url)
        line.show(snapshot, traffic)
    line.close()
    seconds = time.monotonic() - started
    _stop_engine(manager, keep_cache=True)
    snapshot = sidecar.settle()
    if options.summary is not None:
        write_json(options.summary, summary(snapshot, traffic, seconds))
    found = real_mismatches(snapshot)
    verified = sum(group.counters.verified_pages for group in snapshot.groups)
    print(f"{verified:,} page verifications in {seconds:.0f} s, {found} mismatches", flush=True)
    return 1 if found else 0


def _announce(options: Options, url: str | None) -> None:
    if url is None:
        print("pages are being verified (no HTTP port could be had, see the log)", flush=True)
    else:
        print(f"page     {url}/\nmetrics  {url}/metrics\ntry      kv-canary --url {url} status", flush=True)
    if options.ready_file is not None:
        write_json(options.ready_file, {"url": url, "pid": os.getpid()})


def _stop_engine(manager: Any, *, keep_cache: bool = False) -> None:
    if manager.is_running():
        manager.stop(block=True, timeout=_STOP_SECONDS, hard_stop=True, keep_for_next_session=keep_cache)
