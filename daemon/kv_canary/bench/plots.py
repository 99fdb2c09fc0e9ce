"""Plots of a run's document. matplotlib is imported when they are asked for, and belongs to the `bench` extra."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kv_canary.errors import KVCanaryError

Document = Mapping[str, Any]

_SIZE_INCHES, _DOTS_PER_INCH = (6.4, 3.6), 100
_OURS, _LIMIT, _PEER = "#1f6fb4", "#8a8a8a", "#c8702a"


def check_plots(folder: Path) -> None:
    """Raises `KVCanaryError` when nothing can be drawn there: before minutes of measuring, not after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise KVCanaryError("--plots: matplotlib is not installed\npip install 'kv-canary[bench]'") from error
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise KVCanaryError(f"--plots: {folder} is no folder that can be written\nmake it first")


def draw_plots(document: Document, folder: Path) -> list[Path]:
    """Draws every plot that the document has data for; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    plots: tuple[tuple[str, str, Callable[[Any, Any], None]], ...] = (
        ("bandwidth", "bandwidth-by-row-size", _bandwidth),
        ("scale", "sweep-by-pool-size", _sweep),
        ("engine", "throughput-by-budget", _throughput),
    )
    files = []
    for part, name, draw in plots:
        if part in document:
            figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
            axes = figure.add_subplot()
            draw(axes, document[part])
            axes.grid(visible=True, alpha=0.3)
            path = folder / f"{name}.png"
            figure.savefig(path, metadata={"Software": None})
            files.append(path)
    return files


def _bandwidth(axes: Any, rows: list[Document]) -> None:
    # two presets may have pieces of the same size: a line is drawn through the synthetic pools alone
    line = sorted((row for row in rows if row["preset"].startswith("rows-")), key=lambda row: row["run_bytes"]) or rows
    runs = [row["run_bytes"] for row in line]
    ceiling = [row["ceiling_gbps"] for row in line]
    axes.plot(runs, ceiling, color=_LIMIT, marker="_", linestyle="--", label=f"ceiling ({line[0]['ceiling']})")
    axes.plot(runs, [row["gbps"] for row in line], color=_OURS, marker="o", label="verify")
    if all(row["xxh3_gbps"] is not None for row in line):
        axes.plot(runs, [row["xxh3_gbps"] for row in line], color=_PEER, marker="x", label="XXH3, one call a piece")
    for row in rows:
        if row not in line:
            axes.plot(row["run_bytes"], row["gbps"], color=_OURS, marker="D", markersize=5, linestyle="")
            axes.annotate(
                row["preset"], (row["run_bytes"], row["gbps"]), xytext=(4, -11), textcoords="offset points", fontsize=7
            )
    axes.set_xscale("log", base=2)
    axes.set_xlim(right=max(row["run_bytes"] for row in rows) * 3)  # room for the last name
    axes.set_ylim(bottom=0)
    axes.set_xlabel("contiguous bytes of a page in one tensor")
    axes.set_ylabel("GB/s")
    axes.set_title(f"Reading pages, {line[0]['backend']}, {line[0]['threads']} thread(s)", fontsize=10)
    axes.legend(fontsize=8, loc="lower right")


def _sweep(axes: Any, rows: list[Document]) -> None:
    sizes = [row["pool_bytes"] / 1e9 for row in rows]
    axes.plot(sizes, [row["sweep_seconds"] for row in rows], color=_OURS, marker="o", label="back to back, measured")
    axes.plot(
        sizes,
        [row["paced_sweep_seconds"] for row in rows],
        color=_PEER,
        marker="x",
        linestyle="--",
        label="at the default budget of 1%, computed",
    )
    axes.set_yscale("log")
    axes.set_xlabel("pool, GB")
    axes.set_ylabel("seconds of a full sweep")
    axes.set_title(f"A full sweep, every layer ({rows[0]['preset']})", fontsize=10)
    axes.legend(fontsize=8)


def _throughput(axes: Any, document: Document) -> None:
    for model, colour, shift in zip(document["models"], (_OURS, _PEER, _LIMIT), (-0.06, 0.06, 0.0), strict=False):
        places = [place + shift for place in range(len(model["on"]))]
        for place, side in zip(places, model["on"], strict=True):
            axes.plot([place, place], side["throughput_ratio_quartiles"], color=colour, linewidth=5, alpha=0.35)
        medians = [side["throughput_ratio"] for side in model["on"]]
        label = f"{model['model']} model, step of {model['off']['step_median_ms']:.0f} ms"
        axes.plot(places, medians, color=colour, marker="o", label=label)
    budgets = [side["budget"] for side in document["models"][0]["on"]]
    axes.axhline(1.0, color=_LIMIT, linestyle="--", linewidth=1)
    axes.set_xticks(range(len(budgets)), budgets)
    axes.set_ylim(min(0.85, axes.get_ylim()[0]), None)
    axes.set_xlabel("read budget (bars: quartiles of the rounds)")
    axes.set_ylabel("tokens/s, on over off")
    axes.set_title(f"{document['engine']} on {document['device']}, {document['engine_threads']} thread(s)", fontsize=10)
    axes.legend(fontsize=8, loc="lower left")
