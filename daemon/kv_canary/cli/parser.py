"""The command line's grammar: subcommands, options, and what `--help` says."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, NoReturn

from kv_canary._version import __version__
from kv_canary.cli import commands
from kv_canary.cli.client import DEFAULT_TIMEOUT_SECONDS
from kv_canary.cli.watch import watch
from kv_canary.errors import KVCanaryError
from kv_canary.settings import live_settings
from kv_canary.snapshot import DRILL_KINDS

EPILOG = """\
exit status: 0 clean; 1 a real mismatch was found, or a drill was missed; 2 wrong use, refused, or nobody answers
"""


class UsageError(KVCanaryError):
    """The arguments do not follow the grammar."""


class Parser(argparse.ArgumentParser):
    """Raises instead of leaving the process, so that `--json` holds for wrong use too."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\nsee: {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="kv-canary",
        description="Asks and steers the KV Canary inside a running LLM server.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kv-canary {__version__}")
    _add_common(parser)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        command = subparsers.add_parser(name, help=help, description=help, epilog=EPILOG, allow_abbrev=False)
        _add_common(command, is_default=False)
        command.set_defaults(run=run)
        return command

    add("status", commands.status, "what is on, what is wrong, and what to do first")
    command = add("watch", watch, "the status screen again and again, until Ctrl-C")
    command.add_argument("--interval", type=_seconds, default=2.0, metavar="S", help="seconds between two screens (2)")
    add("groups", commands.groups, "every canary group in full")
    command = add("enable", commands.enable, "switch the canary, or one group, on")
    command.add_argument("group", nargs="?", metavar="GROUP", help="only this group (default: the master switch)")
    command = add("disable", commands.disable, "switch the canary, or one group, off")
    command.add_argument("group", nargs="?", metavar="GROUP", help="only this group (default: the master switch)")
    command = add("sweep", commands.sweep, "verify every sealed page now")
    command.add_argument("--group", help="only this group (default: all)")
    command.add_argument("--wait", action="store_true", help="wait for the end and exit 1 if a mismatch was found")
    command = add("incidents", commands.incidents, "the mismatches found, or one of them in full")
    command.add_argument("id", nargs="?", metavar="ID", help="show this one in full")
    command.add_argument("--after", metavar="ID", help="only those after this one")
    command.add_argument("--limit", type=_whole, metavar="N", help="at most so many")
    command = add("drill", commands.drill, "inject a fault to prove that the alarm works")
    command.add_argument("kind", choices=DRILL_KINDS, help="flip a stored fingerprint, or a real byte of the cache")
    command.add_argument("--group", help="in this group (default: the first that has a verified page)")
    command.add_argument("--wait", action="store_true", help="wait for the result and exit 1 if the fault was missed")
    command.add_argument(
        "--alert", action="store_true", help='count it as a mismatch, source="drill": rehearse the alert'
    )
    command = add("settings", commands.settings, "show the settings, or change live ones")
    live = ", ".join(live_settings())
    command.add_argument("changes", nargs="*", metavar="KEY=VALUE", help=f"change these while the server runs: {live}")
    # Listed for --help alone: `main` hands everything after these over before this grammar sees it.
    subparsers.add_parser("demo", help="run an embedded engine with traffic under the canary", add_help=False)
    subparsers.add_parser("bench", help="measure on this machine what guarding a cache costs", add_help=False)
    subparsers.add_parser(
        "faults", help="inject known faults into an engine of its own: what is caught", add_help=False
    )
    return parser


def _add_common(parser: argparse.ArgumentParser, *, is_default: bool = True) -> None:
    """Options that may stand before or after the subcommand; only the outer parser sets defaults."""
    suppress = argparse.SUPPRESS
    group = parser.add_argument_group("the server")
    group.add_argument(
        "--url",
        default=None if is_default else suppress,
        help="control API (default: http://127.0.0.1:10470, or as KV_CANARY_HOST and KV_CANARY_PORT say)",
    )
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        default=None if is_default else suppress,
        help="bearer token for changes (default: KV_CANARY_TOKEN_FILE)",
    )
    group.add_argument(
        "--timeout",
        type=_seconds,
        metavar="S",
        default=None if is_default else suppress,
        help=f"seconds to wait for an answer ({DEFAULT_TIMEOUT_SECONDS:g}), or with --wait for the end",
    )
    group.add_argument(
        "--json",
        action="store_true",
        default=False if is_default else suppress,
        help="the API's JSON document on stdout, for programs",
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and up to 86400")
    return value


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)
