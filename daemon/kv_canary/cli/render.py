"""How things look in a terminal: numbers for people, tables, bars and colour. Knows nothing of KV Canary.

Plain ASCII of its own, at most `WIDTH` columns. Sizes are binary (GiB, as memory is sold), rates decimal (GB/s, as the
`budget` setting is spelled).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TextIO

WIDTH = 100
GAP = "  "
UNKNOWN = "-"

Tone = Literal["good", "bad", "warn", "dim", "strong"]
Number = float | int | None

_CODES: Mapping[Tone, str] = {"good": "32", "bad": "1;31", "warn": "33", "dim": "2", "strong": "1"}


@dataclass(frozen=True, slots=True)
class Painted:
    """A piece of text with the tone it is to have."""

    text: str
    tone: Tone | None


Cell = str | Painted


@dataclass(frozen=True, slots=True)
class Style:
    """Whether colour is used."""

    colour: bool = False

    @classmethod
    def of(cls, stream: TextIO, environment: Mapping[str, str]) -> Style:
        """Colour for a person at a terminal who did not refuse it (https://no-color.org)."""
        return cls(stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb")

    def paint(self, text: str, tone: Tone | None) -> str:
        return f"\x1b[{_CODES[tone]}m{text}\x1b[0m" if self.colour and text and tone else text


def plain(value: object) -> str:
    """Text from outside on one line, without what could steer a terminal."""
    return "".join(character if character.isprintable() else " " for character in str(value))


def count(value: Number) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def _scaled(value: Number, step: int, units: Sequence[str]) -> str:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    amount, unit = float(value), units[0]
    for larger in units[1:]:
        if abs(amount) < step - 0.5:  # 999.7 would be printed as 1000
            break
        amount, unit = amount / step, larger
    digits = 0 if unit == units[0] or amount >= 99.95 else 1
    return f"{amount:.{digits}f} {unit}"


def size(value: Number) -> str:
    """Bytes: `1.5 GiB`."""
    return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def rate(value: Number) -> str:
    """Bytes a second: `2.0 GB/s`."""
    return _scaled(value, 1000, ("B/s", "KB/s", "MB/s", "GB/s", "TB/s"))


def percent(fraction: Number) -> str:
    """Rounded down, so that 100% means finished."""
    return UNKNOWN if fraction is None or not math.isfinite(fraction) else f"{math.floor(fraction * 100 + 1e-9)}%"


def duration(seconds: Number) -> str:
    """`40 ms`, `2.5 s`, `48 s`, `3 min 12 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if isinstance(seconds, int) and seconds < 60:
        return f"{max(0, seconds)} s"
    if seconds < 0.9995:
        return f"{max(0.0, seconds) * 1000:.0f} ms" if seconds > 0 else "0 s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            rest = whole % unit // smaller
            return f"{whole // unit} {name}" + (f" {rest} {smaller_name}" if rest else "")
    return f"{whole} s"


def age(then: Number, now: float) -> str:
    """`12 s ago`; `never` for None. The clock's resolution is a second, so less than that is `just now`."""
    if then is None:
        return "never"
    passed = math.floor(now - then)
    return "just now" if passed < 1 else f"{duration(passed)} ago"


def moment(then: Number) -> str:
    """A date in UTC, the way logs have it."""
    if then is None or not math.isfinite(then):
        return UNKNOWN
    return datetime.fromtimestamp(then, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def bar(fraction: Number, cells: int) -> str:
    """`[######....]`; full only when finished."""
    filled = math.floor(max(0.0, min(1.0, fraction or 0.0)) * cells + 1e-9)
    return "[" + "#" * filled + "." * (cells - filled) + "]"


def paragraph(text: str, *, first: str = "", rest: str | None = None) -> list[str]:
    """Wraps text; `first` starts the first line, `rest` (default: as many blanks) the others."""
    rest = " " * len(first) if rest is None else rest
    return textwrap.wrap(plain(text), WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False) or [
        first.rstrip()
    ]


def facts(pairs: Sequence[tuple[str, str]], style: Style, *, indent: int = 0) -> list[str]:
    """Names on the left, wrapped values on the right, all of it moved in by `indent`."""
    lines: list[str] = []
    column = max((len(name) for name, _ in pairs), default=0) + len(GAP)
    for name, value in pairs:
        first, *more = paragraph(value, first=" " * (indent + column))
        lines += [" " * indent + style.paint(name.ljust(column), "dim") + first[indent + column :], *more]
    return lines


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    style: Style,
    *,
    flexible: int = 0,
    right: Sequence[int] = (),
) -> list[str]:
    """Columns as wide as they need. Where that is too wide, column `flexible` is wrapped: nothing is ever cut off."""
    painted = [[cell if isinstance(cell, Painted) else Painted(cell, None) for cell in row] for row in rows]
    texts = [[plain(cell.text) for cell in row] for row in painted]
    widths = [max(len(text) for text in column) for column in zip(headers, *texts, strict=True)]
    excess = sum(widths) + len(GAP) * (len(widths) - 1) - WIDTH
    if excess > 0:
        widths[flexible] = max(widths[flexible] - excess, len(headers[flexible]), 8)

    def aligned(text: str, column: int) -> str:
        return text.rjust(widths[column]) if column in right else text.ljust(widths[column])

    indent = " " * (sum(widths[:flexible]) + len(GAP) * flexible)
    heading = GAP.join(aligned(header, i) for i, header in enumerate(headers)).rstrip()
    lines = [style.paint(heading, "strong")]
    for row, cells in zip(texts, painted, strict=True):
        row[flexible], *more = textwrap.wrap(row[flexible], widths[flexible], break_on_hyphens=False) or [""]
        lines.append(GAP.join(style.paint(aligned(text, i), cells[i].tone) for i, text in enumerate(row)).rstrip())
        lines += [style.paint(indent + piece, cells[flexible].tone) for piece in more]
    return lines
