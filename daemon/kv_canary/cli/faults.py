"""`kv-canary faults`: its grammar, its progress bar, and what it prints. The faults are in `kv_canary.faults`.

It asks no server, so it stands beside the commands that do. torch is imported when the arguments are right.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kv_canary.cli.bench import TerminalMeter
from kv_canary.cli.parser import Parser
from kv_canary.cli.render import Cell, Painted, Style, duration, paragraph, table
from kv_canary.cli.session import CLEAN, MISMATCH, Surroundings

EPILOG = """\
F1 to F13 are faults of real servers, C1 and on is what healthy ones do. A fault has to be caught by the check that the
catalogue names, and nothing else may be reported; the others have to be silent.
exit status: 0 all of that is so; 1 it is not; 2 wrong use, or not possible here
"""


def run_faults(arguments: Sequence[str], surroundings: Surroundings) -> int:
    """Injects, prints, and says by the exit status whether all were caught. Raises `KVCanaryError` for wrong use."""
    given = _grammar().parse_args(arguments)
    from kv_canary.faults.program import Options, names, run

    meter = TerminalMeter(surroundings.stderr)
    meter.expect(names(given.engine) if not given.only else len(given.only))
    try:
        document = run(
            Options(engine=given.engine, seed=given.seed, only=tuple(given.only or ())),
            begin=meter.begin,
            each=lambda result: meter.advance(),
        )
    finally:
        meter.close()
    if given.json:
        print(json.dumps(document, indent=2), file=surroundings.stdout)
    else:
        lines = faults_screen(document, Style.of(surroundings.stdout, surroundings.environment))
        print(*lines, sep="\n", file=surroundings.stdout)
    surroundings.stdout.flush()
    return CLEAN if document["passed"] else MISMATCH


def faults_screen(document: Mapping[str, Any], style: Style) -> list[str]:
    """A table of the faults, one of the controls, and what was not as it should be."""
    faults = [one for one in document["results"] if one["caught"] is not None]
    controls = [one for one in document["results"] if one["caught"] is None]
    lines: list[str] = []
    if faults:
        rows: list[list[Cell]] = [
            [
                one["fault"],
                Painted("caught", "good") if one["caught"] else Painted("MISSED", "bad"),
                one["check"] or "/".join(one["expected"]) + "?",
                one["persistence"] or "-",
                duration(one["seconds"]),
                _alarms(one),
                one["cause_guess"] or one["problem"] or "-",
            ]
            for one in faults
        ]
        lines += table(("fault", "", "check", "persistence", "after", "false", "cause"), rows, style, flexible=6)
    if controls:
        rows = [
            [
                one["fault"],
                Painted("silent", "good") if one["passed"] else Painted("WRONG", "bad"),
                _alarms(one),
                one["title"],
            ]
            for one in controls
        ]
        lines += ["", *table(("control", "", "false", "what a healthy engine does"), rows, style, flexible=3)]
    for one in document["results"]:
        if one["problem"]:
            lines += ["", *paragraph(one["problem"], first=f"{one['fault']}: ")]
    caught = sum(bool(one["caught"]) for one in faults)
    silent = sum(one["passed"] for one in controls)
    verdict = f"{caught} of {len(faults)} faults caught, {silent} of {len(controls)} controls silent"
    passed = document["passed"]
    word = style.paint("GOOD" if passed else "BAD", "good" if passed else "bad")
    return [*lines, "", f"{word}  {verdict}; engine {document['engine']}, seed {document['seed']}"]


def _alarms(one: Mapping[str, Any]) -> Painted:
    return Painted(str(one["false_alarms"]), "bad" if one["false_alarms"] else None)


def _grammar() -> argparse.ArgumentParser:
    parser = Parser(
        prog="kv-canary faults",
        description="Injects the faults of the catalogue into an engine of its own, and says what the canary caught.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--engine",
        default="harness",
        metavar="NAME",
        help="harness (the reference engine), or an installed one: transformers",
    )
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of everything that is random (0)")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this fault or control (may be repeated)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, for programs")
    return parser


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 32):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {(1 << 32) - 1}")
    return int(text)
