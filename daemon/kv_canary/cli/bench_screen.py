"""What `kv_canary.bench` measured, as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kv_canary.cli.render import UNKNOWN, Style, count, duration, paragraph, size, table

Document = Mapping[str, Any]


def bench_screen(document: Document, style: Style) -> list[str]:
    """Every part that was measured, each with a line that says what it shows."""
    parts: tuple[tuple[str, Callable[[Any, Style], list[str]]], ...] = (
        ("bandwidth", _bandwidth),
        ("hooks", _hooks),
        ("scale", _scale),
        ("engine", _engine),
    )
    lines = _machine(document["machine"])
    for name, draw in parts:
        if name in document:
            lines += ["", *draw(document[name], style)]
    return lines


def _machine(machine: Document) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    text = (
        f"{machine['cpu']}, {machine['cores']} cores, {size(machine['memory_bytes'])} of memory, "
        f"load {machine['load']:.2f} at the start; Python {machine['python']}, {versions}"
    )
    if gpu := machine.get("gpu"):
        text = f"{gpu['name']}, {size(gpu['memory_bytes'])}, CUDA {gpu['cuda']}; " + text
    return paragraph(text)


def _bandwidth(rows: list[Document], style: Style) -> list[str]:
    headers = ("preset", "backend", "verify", "whole", "seal", "ceiling", "ratio", "xxh3", "sglang", "memory", "noise")
    cells = [
        (
            row["preset"],
            f"{row['backend']} x{row['threads']}",
            _number(row["gbps"]),
            _number(row["whole_gbps"]),
            _number(row["seal_gbps"]),
            _number(row["ceiling_gbps"]),
            f"{row['ratio']:.2f}",
            _number(row["xxh3_gbps"]),
            _number(row["sglang_reference_gbps"]),
            f"{row['memory_ratio']:.3%}",
            f"{row['spread']:.0%}",
        )
        for row in rows
    ]
    caption = (
        "GB/s. verify and seal in launches of a millisecond or two, as the scrubber makes them; whole: verify, the "
        "pool in one call; ceiling: the memory's own limit in the same run; ratio: verify over ceiling; xxh3 and "
        "sglang: XXH3, and the reference in Python of SGLang's in-tree canary, where they are installed; memory: "
        "fingerprints and ledger over the pool; noise: distance of the quartiles of the rounds' ratios"
    )
    return [*table(headers, cells, style, right=range(2, 11)), *paragraph(caption)]


def _hooks(rows: list[Document], style: Style) -> list[str]:
    headers = ("ledger", "sequences", "median", "p99", "worst", "steps")
    cells = [
        (
            f"{row['ledger']} ({row['device']})",
            count(row["sequences"]),
            f"{row['median_us']:.1f} us",
            f"{row['p99_us']:.1f} us",
            f"{row['maximum_us']:.0f} us",
            count(row["steps"]),
        )
        for row in rows
    ]
    return [
        *table(headers, cells, style, right=range(1, 6)),
        *paragraph("Time a step that the engine's thread spends in the ledger, while a canary thread drains it"),
    ]


def _scale(rows: list[Document], style: Style) -> list[str]:
    headers = ("pool", "pages", "sweep", "at 1%", "GB/s", "ratio", "fingerprints", "ledger", "memory", "hooks")
    cells = [
        (
            f"{row['pool_bytes'] / 1e9:.1f} GB",
            count(row["pages"]),
            duration(row["sweep_seconds"]),
            duration(row["paced_sweep_seconds"]),
            _number(row["gbps"]),
            f"{row['ratio']:.2f}",
            size(row["fingerprint_bytes"]),
            size(row["ledger_bytes"]),
            f"{row['memory_ratio']:.3%}",
            f"{row['hooks_median_us']:.1f} us",
        )
        for row in rows
    ]
    caption = (
        f"Pools of {rows[0]['preset']}. sweep: launches back to back; at 1%: at the default budget, computed from the "
        "bandwidth; hooks: median a step at 64 sequences"
    )
    return [*table(headers, cells, style, right=range(10)), *paragraph(caption)]


def _engine(document: Document, style: Style) -> list[str]:
    headers = ("model", "canary", "tokens/s", "noise", "ratio", "quartiles", "step", "p99", "hooks", "read")
    cells = []
    for model in document["models"]:
        cells.append((model["model"], *_engine_row("off", model["off"], None)))
        cells += [(model["model"], *_engine_row(f"on, {on['budget']}", on, on)) for on in model["on"]]
    sizes = ", ".join(
        f"{model['model']}: {model['parameters'] / 1e6:.0f} M parameters and {model['new_tokens']} new tokens a request"
        for model in document["models"]
    )
    caption = (
        f"{document['engine']} {document['engine_version']} on {document['device']}, {document['engine_threads']} "
        f"thread(s), {document['requests']} requests, {document['repeats']} runs each that take turns; {sizes}. ratio: "
        "tokens/s over the same round's run without the canary; step and p99: of a step's time; hooks: the adapter's "
        "time in a step; read: bytes that the canary read"
    )
    return [*table(headers, cells, style, right=range(2, 10)), *paragraph(caption)]


def _engine_row(name: str, side: Document, against: Document | None) -> tuple[str, ...]:
    low, high = against["throughput_ratio_quartiles"] if against else (None, None)
    return (
        name,
        f"{side['tokens_per_second']:,.0f}",
        f"{side['spread']:.1%}",
        f"{against['throughput_ratio']:.3f}" if against else UNKNOWN,
        f"{low:.3f} .. {high:.3f}" if against else UNKNOWN,
        f"{side['step_median_ms']:.2f} ms",
        f"{side['step_p99_ms']:.2f} ms",
        f"{side['hook_us_per_step']:.0f} us" if against else UNKNOWN,
        f"{side['read_bytes_per_second'] / 1e6:,.0f} MB/s" if against else UNKNOWN,
    )


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
