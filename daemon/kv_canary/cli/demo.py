"""`kv-canary demo`: finds an engine's demo through the entry point group `kv_canary.demo` and hands over to it.

The daemon imports no engine, so it knows the demo by name only.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from importlib.metadata import entry_points

from kv_canary.errors import KVCanaryError

ENTRY_POINT_GROUP = "kv_canary.demo"
DEFAULT_ENGINE = "transformers"


def run_demo(arguments: Sequence[str]) -> int:
    """Runs the demo of `--engine`; every other argument, `--help` too, is the demo's own.

    Raises `KVCanaryError` when there is no such demo or a package that it needs is not installed.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--engine", default=DEFAULT_ENGINE)
    try:
        chosen, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise KVCanaryError(f"demo: {error}\nfor example: kv-canary demo --engine {DEFAULT_ENGINE}") from error
    demos = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if chosen.engine not in demos:
        names = ", ".join(sorted(demos)) or "none"
        raise KVCanaryError(f"there is no demo for engine {chosen.engine!r}; there are: {names}\n{_install()}")
    try:
        status = int(demos[chosen.engine].load()(rest) or 0)
        gc.freeze()  # or the interpreter, ending, goes through all of torch and the engine several times: two seconds
        return status
    except ModuleNotFoundError as error:
        package = (error.name or "?").partition(".")[0]
        raise KVCanaryError(f"the demo needs the package {package!r}, which is not installed: {_install()}") from error
    except ImportError as error:
        raise KVCanaryError(f"the demo cannot be loaded: {error}\n{_install('-U ')}") from error


def _install(options: str = "") -> str:
    return f"pip install {options}'kv-canary[demo]'"
