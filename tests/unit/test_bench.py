"""`kv-canary bench`: presets are what they say, wrong use exits 2, a run gives a whole document, no timing judged."""

from __future__ import annotations

import io
import itertools
import json
import statistics
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kv_canary.bench import engines, memory
from kv_canary.bench.contenders import ceilings, launches, peers
from kv_canary.bench.hooks import measure_hooks, small_pool
from kv_canary.bench.plots import draw_plots
from kv_canary.bench.presets import PRESETS, ROW_SWEEP, find_preset, page_pieces, words_per_page
from kv_canary.bench.program import Options, run
from kv_canary.bench.timing import interleaved, paired, percentile, spread
from kv_canary.cli import program
from kv_canary.cli.bench import TerminalMeter
from kv_canary.cli.bench_screen import bench_screen
from kv_canary.cli.render import Style
from kv_canary.cli.session import Surroundings
from kv_canary.errors import KVCanaryError
from kv_canary.fingerprint import spec
from kv_canary.fingerprint.backends import open_table

ROW_FIELDS = {
    *("preset", "backend", "device", "threads", "pages", "bytes_per_page", "run_bytes", "stripes", "pool_bytes"),
    *("launch_pages", "gbps", "whole_gbps", "seal_gbps", "ceiling_gbps", "ceiling", "ratio", "whole_ratio"),
    *("xxh3_gbps", "sglang_reference_gbps", "fingerprint_bytes", "ledger_bytes", "memory_ratio", "repeats", "spread"),
}


class SilentMeter:
    """Counts the units it is told of."""

    expected = 0.0
    done = 0.0

    def expect(self, units: int) -> None:
        self.expected = units

    def begin(self, label: str) -> None: ...

    def advance(self, units: float = 1) -> None:
        self.done += units


def invoke(*arguments: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error)"""
    surroundings = Surroundings(stdout=io.StringIO(), stderr=io.StringIO(), environment={})
    status = program.run(["bench", *arguments], surroundings)
    return status, surroundings.stdout.getvalue(), surroundings.stderr.getvalue()  # type: ignore[attr-defined]


# --- presets


@pytest.mark.parametrize(
    ("name", "page_tokens", "buffers", "bytes_per_page", "memory_bytes"),
    [
        ("llama-8b", 16, 64, 32 * 2 * 16 * 8 * 128 * 2, 32 * 2 * 16 * 8 * 128 * 2),
        ("llama-70b-tp8", 16, 160, 80 * 2 * 16 * 128 * 2, 80 * 2 * 16 * 128 * 2),
        ("deepseek-mla", 64, 61, 61 * 64 * 576 * 2, 61 * 64 * 576 * 2),
        ("dsv4", 64, 16, 8 * 64 * (576 + 8), 8 * 37_440),
        ("token-granular", 1, 64, 32 * 2 * 8 * 128 * 2, 32 * 2 * 8 * 128 * 2),
        ("rows-584", 1, 32, 32 * 584, 32 * 584),
    ],
)
def test_a_preset_has_the_geometry_it_claims(
    name: str, page_tokens: int, buffers: int, bytes_per_page: int, memory_bytes: int
) -> None:
    preset = find_preset(name)
    group = preset.build(torch.zeros(2 * preset.minimum_bytes, dtype=torch.uint8))
    assert preset.memory_bytes_per_page == memory_bytes
    assert (group.page_tokens, len(group.buffers), group.bytes_per_page) == (page_tokens, buffers, bytes_per_page)
    assert words_per_page(group) * 8 == bytes_per_page
    assert group.pages >= 2


def test_dsv4_keeps_its_scales_behind_the_rows() -> None:
    """Row i at i * 576, scale i at 64 * 576 + 8 * i, and the rest of a page belongs to nobody."""
    group = PRESETS["dsv4"].build(torch.zeros(1 << 20, dtype=torch.uint8))
    data, scales = group.buffers[:2]
    assert (data.run_bytes, scales.run_bytes, scales.address - data.address) == (64 * 576, 64 * 8, 64 * 576)
    assert data.page_stride == scales.page_stride == 37_440


@pytest.mark.parametrize("name", [*PRESETS, *ROW_SWEEP])
def test_no_two_pieces_of_a_pool_overlap_and_none_lies_outside(name: str) -> None:
    preset = find_preset(name)
    whole = torch.zeros(3 * preset.minimum_bytes + 100, dtype=torch.uint8)
    part = whole[100:]
    group = preset.build(part)
    pieces = sorted(page_pieces(group, range(group.pages)))
    assert pieces[0][0] >= part.data_ptr()
    assert pieces[-1][0] + pieces[-1][1] <= part.data_ptr() + part.numel()
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(pieces))


def test_a_pool_over_a_part_of_the_memory_is_read_where_it_lies() -> None:
    """The first page's fingerprint is that of the bytes at the addresses that the preset names."""
    whole = memory.random_memory(4 << 20, torch.device("cpu"), seed=3)
    group = PRESETS["dsv4"].build(whole[1000:])
    found = open_table(group).read(np.arange(2))
    assert [int(value) for value in found[1]] == [spec.fingerprint_page(stripe, 1) for stripe in group.stripes]


def test_memory_is_filled_to_the_last_byte() -> None:
    filled = memory.random_memory((1 << 21) + 5, torch.device("cpu")).numpy()
    assert len(filled) == (1 << 21) + 5
    counts = np.bincount(filled, minlength=256)
    assert counts.min() > 0.9 * counts.mean()
    assert filled[-64:].any()


# --- measuring


def test_contenders_take_turns_after_one_pass_that_does_not_count() -> None:
    calls: list[str] = []
    rates = interleaved({"a": lambda: calls.append("a") or 10, "b": lambda: calls.append("b") or 20}, 2)
    assert calls == ["a", "b"] * 3
    assert [len(rates["a"]), len(rates["b"])] == [2, 2]


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.99), percentile(values, 0.5), percentile([7.0], 0.99)) == (99.0, 50.0, 7.0)


def test_spread_is_the_distance_of_the_quartiles() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert spread([4.0]) == 0.0
    assert statistics.median(paired([2.0, 9.0], [1.0, 3.0])) == 2.5


def test_launches_cover_every_page_once_in_address_order() -> None:
    group = PRESETS["token-granular"].build(torch.zeros(8 << 20, dtype=torch.uint8))
    windows = launches(group, 10 * group.bytes_per_page + 1)
    assert {len(window) for window in windows[:-1]} == {10}
    assert np.array_equal(np.concatenate(windows), np.arange(group.pages))


def test_ceiling_and_peer_read_the_bytes_of_the_pool() -> None:
    whole = memory.random_memory(4 << 20, torch.device("cpu"))
    group = PRESETS["token-granular"].build(whole)
    assert [limit() for limit in ceilings(whole).values()] == [4 << 20]
    assert all(peer() == group.pages * group.bytes_per_page for peer in peers(group).values())


@pytest.mark.parametrize("kind", ["host", "tensor"])
@pytest.mark.parametrize("sequences", [1, 24])
def test_the_synthetic_engine_keeps_to_the_protocol(kind: Any, sequences: int) -> None:
    """Pages are allocated, sealed, released and freed under a real canary, which finds nothing wrong."""
    row = measure_hooks(kind, sequences=sequences, device=torch.device("cpu"), pages=256, steps=200)
    assert row.mismatches == 0
    assert row.sealed_pages >= 200 * sequences // 16
    assert 0 < row.median_us <= row.p99_us <= row.maximum_us


def test_the_pool_for_hooks_is_small() -> None:
    assert small_pool(64, torch.device("cpu")).bytes_per_page == 1024


# --- the command


def test_a_tiny_run_gives_a_whole_document() -> None:
    status, out, err = invoke("--json", "--device", "cpu", "--size", "10MB", "--repeat", "2")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert set(document) == {"version", "machine", "bandwidth"}
    assert {"cpu", "cores", "memory_bytes", "load", "versions"} <= set(document["machine"])
    assert [row["preset"] for row in document["bandwidth"]] == list(PRESETS)
    for row in document["bandwidth"]:
        assert set(row) == ROW_FIELDS
        assert (row["backend"], row["threads"], row["repeats"], row["ceiling"]) == ("cpu", 1, 2, "reduction")
        assert min(row["gbps"], row["whole_gbps"], row["seal_gbps"], row["ceiling_gbps"]) > 0
        assert row["ratio"] == pytest.approx(row["gbps"] / row["ceiling_gbps"])
        assert 0 < row["pool_bytes"] <= 10e6
        assert row["memory_ratio"] == pytest.approx(
            (row["fingerprint_bytes"] + row["ledger_bytes"]) / row["pool_bytes"]
        )


def test_fingerprints_and_ledger_are_small() -> None:
    """At most 0.4% of the pool where a page is one token, 0.1% elsewhere."""
    meter = SilentMeter()
    rows = run(Options(device="cpu", size_bytes=10**7, repeats=1), meter)["bandwidth"]
    assert all(row["memory_ratio"] <= (0.004 if row["preset"] == "token-granular" else 0.001) for row in rows)
    assert meter.done == meter.expected == len(PRESETS)


def test_torch_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    assert invoke("--json", "--preset", "rows-512", "--size", "2MB", "--repeat", "1", "--threads", "3")[0] == 0
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--preset", "lama-8b"), "there is no preset 'lama-8b'"),
        (("--size", "900TB", "--device", "cpu"), "is larger than the memory that is free here"),
        (("--size", "1MB"), "bytes hold no page of llama-8b; give at least"),
        (("--size", "big"), "--size: 'big' is not allowed"),
        (("--threads", "0"), "'0' is not a whole number from 1"),
        (("--engine", "abacus"), "there is no bench for engine 'abacus'; there are: transformers"),
        (("--budget", "1%"), "--budget goes with --engine"),
        (("--engine", "transformers", "--budget", "off"), "--budget: 'off' is not allowed"),
        (("--plots", "/nowhere/at/all"), "--plots: /nowhere/at/all is no folder that can be written"),
        (("--device", "abacus"), "invalid choice: 'abacus'"),
    ],
)
def test_wrong_use_is_told_in_a_line_and_exits_2(arguments: tuple[str, ...], said: str) -> None:
    status, out, err = invoke(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("kv-canary: ")
    assert said in err


def test_cuda_without_a_gpu_exits_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, _, err = invoke("--device", "cuda")
    assert status == 2
    assert "--device: cuda is not available here; use --device cpu (or auto)" in err


def test_wrong_use_is_a_document_for_programs() -> None:
    status, out, _ = invoke("--preset", "lama-8b", "--json")
    assert status == 2
    assert "did you mean llama-8b?" in json.loads(out)["error"]


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("--help")[0] == 0
    text = capsys.readouterr().out
    for option in (
        "--preset",
        "--device",
        "--size",
        "--threads",
        "--repeat",
        "--hooks",
        "--scale",
        "--engine",
        "--plots",
    ):
        assert option in text


def test_the_bar_is_drawn_for_a_person_and_wiped_off() -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    meter = TerminalMeter(stream)
    meter.expect(2)
    meter.begin("llama-8b")
    meter.advance()
    meter.close()
    assert "[..............................] llama-8b" in stream.getvalue()
    assert stream.getvalue().endswith(" \r")


# --- tables and plots


def engine_document() -> dict[str, Any]:
    side = {
        "tokens_per_second": 1000.0,
        "spread": 0.01,
        "steps": 50,
        "step_median_ms": 10.0,
        "step_p99_ms": 20.0,
        "hook_us_per_step": 50.0,
        "read_bytes_per_second": 1e8,
        "mismatches": 0,
    }
    against = {"throughput_ratio": 0.99, "throughput_ratio_quartiles": [0.98, 1.0], "throughput_ratios": [0.98, 1.0]}
    on = [{"budget": budget, **side, **against} for budget in ("1%", "5%")]
    model = {"model": "tiny", "parameters": 2_000_000, "new_tokens": 8, "off": side, "on": on}
    about = {"engine": "transformers", "engine_version": "5", "device": "cpu", "engine_threads": 1}
    return {**about, "requests": 4, "repeats": 2, "models": [model]}


def scale_rows() -> list[dict[str, Any]]:
    row = {"preset": "llama-8b", "device": "cpu", "pages": 10, "sweep_seconds": 0.1, "paced_sweep_seconds": 10.0}
    row |= {"gbps": 10.0, "ratio": 0.9, "fingerprint_bytes": 1000, "ledger_bytes": 1000, "memory_ratio": 0.0003}
    return [{**row, "pool_bytes": size, "hooks_median_us": 30.0, "hooks_p99_us": 60.0} for size in (10**9, 2 * 10**9)]


def whole_document() -> dict[str, Any]:
    options = Options(presets=("rows-512", "rows-2048", "dsv4"), device="cpu", size_bytes=10**7, repeats=1)
    hooks = measure_hooks("host", sequences=2, device=torch.device("cpu"), pages=64, steps=20).as_document()
    return run(options, SilentMeter()) | {"hooks": [hooks], "scale": scale_rows(), "engine": engine_document()}


def test_people_get_a_table_of_each_part_within_100_columns() -> None:
    lines = bench_screen(whole_document(), Style())
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for word in ("rows-512", "host (cpu)", "2.0 GB", "on, 5%", "0.98"):
        assert word in text


def test_every_part_has_its_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the bench extra")
    files = draw_plots(whole_document(), tmp_path)
    assert [file.name for file in files] == [
        "bandwidth-by-row-size.png",
        "sweep-by-pool-size.png",
        "throughput-by-budget.png",
    ]
    assert all(file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size < 100_000 for file in files)


# --- engines


def test_an_engine_part_is_found_by_name_and_told_what_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[engines.EngineRequest] = []

    def measure(request: engines.EngineRequest) -> dict[str, Any]:
        asked.append(request)
        return {"engine": "fake"}

    module = type(sys)("a_fake_engine_bench")
    module.measure = measure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_fake_engine_bench", module)
    points = [EntryPoint("fake", "a_fake_engine_bench:measure", engines.ENTRY_POINT_GROUP)]
    monkeypatch.setattr(engines, "entry_points", lambda group: points)
    document = run(Options(device="cpu", engine="fake", repeats=3), SilentMeter())
    assert set(document) == {"version", "machine", "engine"}
    assert (asked[0].device, [str(budget) for budget in asked[0].budgets], asked[0].repeats) == ("cpu", ["1%"], 3)


def test_an_engine_that_is_not_installed_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("gone", "a_package_that_is_not_there:measure", engines.ENTRY_POINT_GROUP)]
    monkeypatch.setattr(engines, "entry_points", lambda group: points)
    with pytest.raises(KVCanaryError, match="the bench for gone cannot be loaded"):
        engines.find_engine("gone")


def test_the_bench_of_the_daemon_imports_no_engine() -> None:
    code = (
        "import sys, kv_canary.bench.program, kv_canary.cli.bench_screen, kv_canary.bench.plots; "
        "print([name for name in ('transformers', 'vllm', 'sglang', 'matplotlib', 'xxhash') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
