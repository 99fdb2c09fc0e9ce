"""Writes the tables of `detection.md` from runs of `kv-canary faults`: `python docs/generate_detection.py`.

With `--check` it compares only, and leaves the seconds out, which are another machine's. What stands between the marks
is made here, everything else on that page is prose.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kv_canary.faults.program import Options, run

PAGE = Path(__file__).with_name("detection.md")
BEGIN = "<!-- made by docs/generate_detection.py from `kv-canary faults{options}`: do not edit -->"
END = "<!-- end -->"
ENGINES = ("harness", "transformers")


def table_of(document: dict[str, Any]) -> str:
    """The faults and the controls of one engine."""
    faults = [one for one in document["results"] if one["caught"] is not None]
    controls = [one for one in document["results"] if one["caught"] is None]
    rows = [
        (
            one["fault"],
            one["title"],
            "caught" if one["caught"] else "**missed**",
            f"`{one['check']}`",
            one["persistence"] or "-",
            f"{one['seconds'] * 1000:.0f} ms" if one["seconds"] is not None else "-",
            str(one["false_alarms"]),
            _without_numbers(one["cause_guess"] or one["problem"] or "-"),
        )
        for one in faults
    ]
    silent = [(one["fault"], one["title"], "silent" if one["passed"] else "**wrong**") for one in controls]
    return "\n".join(
        (
            *_table(("", "fault", "", "check", "persistence", "after", "false alarms", "cause that it gives"), rows),
            "",
            *_table(("", "what healthy engines do", ""), silent),
        )
    )


def _without_numbers(cause: str) -> str:
    """Page numbers, steps and names of requests are of this run alone."""
    cause = re.sub(r"page \d+", "page P", cause)
    cause = re.sub(r"\d+ steps? before", "N steps before", cause)
    cause = re.sub(r"last owner was \S+", "last owner was R", cause)
    return re.sub(
        r"buffer \S+, layer \d+, token row \d+, byte \d+, bit \d",
        "buffer B, layer L, token row T, byte Y, bit Z",
        cause,
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows)]


def with_tables(page: str, tables: dict[str, str]) -> str:
    """The page with what stands between the marks replaced."""
    for engine, table in tables.items():
        options = "" if engine == "harness" else f" --engine {engine}"
        begin = BEGIN.format(options=options)
        before, mark, rest = page.partition(begin)
        _, end, after = rest.partition(END)
        if not mark or not end:
            raise SystemExit(f"{PAGE.name} has no place for engine {engine}: {begin}")
        page = f"{before}{begin}\n\n{table}\n\n{END}{after}"
    return page


def without_seconds(page: str) -> str:
    return re.sub(r"\| \d+ ms \|", "| - |", page)


def main(arguments: list[str]) -> int:
    check = "--check" in arguments
    engines = [one for one in arguments if one != "--check"] or list(ENGINES)
    if not set(engines) <= set(ENGINES):
        print(f"usage: {Path(sys.argv[0]).name} [--check] [{' | '.join(ENGINES)}]...", file=sys.stderr)
        return 2
    documents = {engine: run(Options(engine=engine)) for engine in engines}
    page = PAGE.read_text(encoding="utf-8")
    fresh = with_tables(page, {engine: table_of(document) for engine, document in documents.items()})
    if not check:
        PAGE.write_text(fresh, encoding="utf-8")
        return 0 if all(document["passed"] for document in documents.values()) else 1
    if without_seconds(fresh) != without_seconds(page):
        print(f"{PAGE.name} is not what a run says; run docs/generate_detection.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
