"""The instance dashboard: one server in depth."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import units
from panels import (
    GREEN,
    ORANGE,
    RED,
    board,
    graph,
    label,
    limit_line,
    number,
    queries,
    query,
    series_variable,
    switches,
)
from shared import AGE, BAD_ABOVE_0, GROUP, SERVER, SILENCE, mark_mismatches


def instance() -> dashboard.Dashboard:
    built = board("kv-canary-instance", "KV Canary / Instance", "One server's KV cache and the canary that guards it.")
    built.with_variable(series_variable("job", "label_values(kv_canary_build_info, job)", several=False))
    in_job = 'kv_canary_build_info{job=~"$job"}'
    built.with_variable(series_variable("instance", f"label_values({in_job}, instance)", several=False))
    built.with_variable(series_variable("group", f"label_values(kv_canary_enabled{{{SERVER}}}, group)", several=True))
    built.with_variable(
        dashboard.TextBoxVariable("deadline")
        .label("Sweep deadline (s)")
        .description("This server's KV_CANARY_SWEEP_DEADLINE, drawn as the limit in the graphs.")
        .default_value("60")
    )
    built.link(dashboard.DashboardLink("Fleet").url("/d/kv-canary-fleet").keep_time(True))
    mark_mismatches(built)
    for row in (_now, _pages, _sweeps, _proof, _cost):
        row(built)
    return built


def _now(built: dashboard.Dashboard) -> None:
    built.with_row(dashboard.Row("Now"))
    built.with_panel(
        label(
            "What runs",
            "Engine, device and canary, with their versions.",
            query(
                f"kv_canary_build_info{{{SERVER}}}",
                "{{engine}} {{engine_version}} on {{device}}, canary {{version}}",
                instant=True,
            ),
            width=6,
        )
    )
    built.with_panel(
        number(
            "Guarded",
            "Off if the master switch or any of the chosen groups is off; then /v1/groups says why.",
            query(f"min(kv_canary_enabled{{{GROUP}}})", instant=True),
            width=3,
            limits=((None, RED), (1, GREEN)),
            meanings={"0": ("off", RED), "1": ("on", GREEN)},
        )
    )
    built.with_panel(
        number(
            "Mismatches",
            "Real ones since the server started. 0 is normal. Anything else: /v1/incidents and the runbook.",
            query(f'sum(kv_canary_mismatches_total{{{GROUP}, source="real"}})', instant=True),
            width=3,
            limits=BAD_ABOVE_0,
        )
    )
    built.with_panel(
        number(
            "Silence",
            "Since the canary thread last went round. Under a second and a scrape is normal, a minute is an alert.",
            query(f"max(time() - kv_canary_last_tick_timestamp_seconds{{{SERVER}}})", instant=True),
            unit=units.Seconds,
            width=3,
            limits=SILENCE,
        )
    )
    built.with_panel(
        number(
            "Oldest verification",
            "The page that waits longest for its next check. Below the sweep deadline is normal.",
            query(f"max(kv_canary_oldest_verification_age_seconds{{{GROUP}}})", instant=True),
            unit=units.Seconds,
            width=3,
            limits=AGE,
        )
    )
    built.with_panel(
        number(
            "Last whole sweep",
            "Since a pass over all pages of a group last ended; the group that waits longest.",
            query(f"max(time() - kv_canary_last_sweep_timestamp_seconds{{{GROUP}}})", instant=True),
            unit=units.Seconds,
            width=3,
            limits=AGE,
        )
    )
    built.with_panel(
        number(
            "Not covered",
            "Tensors that are not checked, those of no group included. /v1/status lists them with reasons.",
            query(f"sum(kv_canary_uncovered_buffers{{{SERVER}}})", instant=True),
            width=3,
            limits=((None, GREEN), (1, ORANGE)),
        )
    )


def _pages(built: dashboard.Dashboard) -> None:
    built.with_row(dashboard.Row("Groups and pages"))
    built.with_panel(
        switches(
            "Groups",
            "When each group was guarded. A gap is a time without a scrape.",
            queries((f"max by (group) (kv_canary_enabled{{{GROUP}}})", "{{group}}")),
            width=8,
        )
    )
    built.with_panel(
        graph(
            "Pages by state",
            "Sealed and free pages are verified, open ones are being written. Unknown ones are not guarded yet.",
            queries((f"sum by (state) (kv_canary_pages{{{GROUP}}})", "{{state}}")),
            width=8,
            stacked=True,
        )
    )
    built.with_panel(
        graph(
            "Mismatches by check",
            "Real and rehearsed (drill) ones. A flat zero is normal.",
            queries(
                (
                    f"sum by (check, source) (increase(kv_canary_mismatches_total{{{GROUP}}}[$__rate_interval]))",
                    "{{check}} ({{source}})",
                )
            ),
            width=8,
            bars=True,
        )
    )


def _sweeps(built: dashboard.Dashboard) -> None:
    built.with_row(dashboard.Row("Sweeps: budget against deadline"))
    built.with_panel(
        limit_line(
            graph(
                "Background reads and budget",
                "At the dashed line the sweep is limited by KV_CANARY_BUDGET; below it there is nothing more to read.",
                queries(
                    (
                        f'sum(rate(kv_canary_read_bytes_total{{{GROUP}, purpose="sweep"}}[$__rate_interval]))',
                        "sweep",
                    ),
                    (f"max(kv_canary_budget_bytes_per_second{{{SERVER}}})", "budget"),
                ),
                unit=units.BytesPerSecondSI,
            ),
            "budget",
        )
    )
    built.with_panel(
        limit_line(
            graph(
                "Oldest verification and deadline",
                "Above the dashed line the budget is too small for this cache: raise it, or allow more time.",
                queries(
                    (f"max by (group) (kv_canary_oldest_verification_age_seconds{{{GROUP}}})", "{{group}}"),
                    ("vector($deadline)", "deadline"),
                ),
                unit=units.Seconds,
            ),
            "deadline",
        )
    )
    built.with_panel(
        graph(
            "Duration of a sweep",
            "A whole pass over a group: the middle and the slowest of a hundred.",
            queries(
                *(
                    (
                        f"histogram_quantile({quantile}, sum by (group, le) "
                        f"(rate(kv_canary_sweep_duration_seconds_bucket{{{GROUP}}}[$__rate_interval])))",
                        f"{{{{group}}}} p{quantile * 100:g}",
                    )
                    for quantile in (0.5, 0.99)
                )
            ),
            unit=units.Seconds,
            width=8,
        )
    )
    built.with_panel(
        graph(
            "Sweeps by result",
            "Passes a second. Mismatch is never normal; interrupted ones come from switching off and detaching.",
            queries((f"sum by (result) (rate(kv_canary_sweeps_total{{{GROUP}}}[$__rate_interval]))", "{{result}}")),
            width=8,
        )
    )
    built.with_panel(
        graph(
            "Pages verified",
            "Pages a second whose bytes were held against their fingerprint, and results dropped because the page was "
            "rewritten meanwhile.",
            queries(
                (f"sum by (group) (rate(kv_canary_verified_pages_total{{{GROUP}}}[$__rate_interval]))", "{{group}}"),
                (
                    f"sum by (group) (rate(kv_canary_superseded_total{{{GROUP}}}[$__rate_interval]))",
                    "{{group}} dropped",
                ),
            ),
            width=8,
        )
    )


def _proof(built: dashboard.Dashboard) -> None:
    built.with_row(dashboard.Row("Is the canary itself right?"))
    built.with_panel(
        graph(
            "Drills",
            "Faults put there on purpose, every ten minutes by itself. Missed is never normal.",
            queries(
                (
                    f"sum by (kind, result) (increase(kv_canary_drills_total{{{SERVER}}}[$__rate_interval]))",
                    "{{kind}} {{result}}",
                )
            ),
            width=8,
            bars=True,
        )
    )
    built.with_panel(
        graph(
            "Drills since the start",
            "They go on while the server serves: a line that stands still for longer than the drill interval does not.",
            queries((f"sum by (kind, result) (kv_canary_drills_total{{{SERVER}}})", "{{kind}} {{result}}")),
            width=8,
        )
    )
    built.with_panel(
        graph(
            "Errors by component",
            "Errors of the canary itself since the start; the engine goes on. /v1/status has the newest in words.",
            queries((f"sum by (component) (kv_canary_errors_total{{{SERVER}}})", "{{component}}")),
            width=8,
        )
    )


def _cost(built: dashboard.Dashboard) -> None:
    built.with_row(dashboard.Row("What it costs"))
    built.with_panel(
        graph(
            "Bytes read by purpose",
            "Only sweeps have a budget; seals and claims follow the traffic and are never put off.",
            queries(
                (f"sum by (purpose) (rate(kv_canary_read_bytes_total{{{GROUP}}}[$__rate_interval]))", "{{purpose}}")
            ),
            unit=units.BytesPerSecondSI,
            stacked=True,
        )
    )
    built.with_panel(
        graph(
            "Share of the engine's thread by hook",
            "All together below 1% is normal.",
            queries(
                (f"sum by (event) (rate(kv_canary_hook_seconds_total{{{SERVER}}}[$__rate_interval]))", "{{event}}")
            ),
            unit=units.PercentUnit,
            stacked=True,
        )
    )
    built.with_panel(
        graph(
            "Share of the device by kernel",
            "Time in the canary's kernels. It follows the read budget.",
            queries(
                (f"sum by (kernel) (rate(kv_canary_kernel_seconds_total{{{SERVER}}}[$__rate_interval]))", "{{kernel}}")
            ),
            unit=units.PercentUnit,
            stacked=True,
        )
    )
    built.with_panel(
        graph(
            "Memory of the canary",
            "Fingerprints and page tables. It grows with the cache's pages, not with time.",
            queries((f"sum by (kind) (kv_canary_memory_bytes{{{SERVER}}})", "{{kind}}")),
            unit=units.BytesSI,
            stacked=True,
        )
    )
