"""The fleet dashboard: is any server's KV cache wrong, who is guarded, and what that costs."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import units
from panels import GREEN, ORANGE, RED, board, colored, graph, number, queries, query, rows, series_variable, switches
from shared import AGE, BAD_ABOVE_0, GROUP, SERVER, SILENCE, mark_mismatches

INSTANCE_URL = (
    "/d/kv-canary-instance?var-datasource=${datasource}&var-job=${__data.fields.job}"
    "&var-instance=${__data.fields.instance}&${__url_time_range}"
)


def fleet() -> dashboard.Dashboard:
    built = board("kv-canary-fleet", "KV Canary / Fleet", "Which LLM servers have a guarded KV cache, and is it right.")
    built.with_variable(series_variable("job", "label_values(kv_canary_build_info, job)", several=True))
    in_job = 'kv_canary_build_info{job=~"$job"}'
    built.with_variable(series_variable("instance", f"label_values({in_job}, instance)", several=True))
    built.with_variable(series_variable("group", f"label_values(kv_canary_enabled{{{SERVER}}}, group)", several=True))
    mark_mismatches(built)

    built.with_row(dashboard.Row("Is anything wrong?"))
    built.with_panel(
        number(
            "Servers guarded",
            "Servers (ranks) with at least one group switched on. Compare with how many there should be.",
            query(f"count(max by (job, instance) (kv_canary_enabled{{{GROUP}}}) == 1) or vector(0)", instant=True),
            limits=((None, RED), (1, GREEN)),
        )
    )
    built.with_panel(
        number(
            "Mismatches",
            "Real ones since the servers started; drills are not among them. 0 is normal. Anything else: the runbook.",
            query(f'sum(kv_canary_mismatches_total{{{GROUP}, source="real"}})', instant=True),
            limits=BAD_ABOVE_0,
        )
    )
    built.with_panel(
        number(
            "Drills missed",
            "Faults put there on purpose that a canary did not see. 0 is normal; else its silence proves nothing.",
            query(f'sum(kv_canary_drills_total{{{SERVER}, result="missed"}})', instant=True),
            limits=BAD_ABOVE_0,
        )
    )
    built.with_panel(
        number(
            "Longest silence",
            "Since the canary thread that is most behind last went round. Under a second and a scrape is normal.",
            query(f"max(time() - kv_canary_last_tick_timestamp_seconds{{{SERVER}}})", instant=True),
            unit=units.Seconds,
            limits=SILENCE,
        )
    )
    built.with_panel(
        number(
            "Oldest verification",
            "The page that waits longest for its next check, over all servers. Below the sweep deadline is normal.",
            query(f"max(kv_canary_oldest_verification_age_seconds{{{GROUP}}})", instant=True),
            unit=units.Seconds,
            limits=AGE,
        )
    )
    built.with_panel(
        number(
            "Canary errors",
            "Errors of the canaries themselves since the servers started; the engines go on. 0 is normal.",
            query(f"sum(kv_canary_errors_total{{{SERVER}}})", instant=True),
            limits=((None, GREEN), (1, ORANGE)),
        )
    )

    built.with_row(dashboard.Row("Who is guarded"))
    by = "by (job, instance, group)"
    guarded = rows(
        "Groups",
        "A line for each group of each server; a click on the instance opens it. Groups that are off stand first.",
        {
            "On": (f"max {by} (kv_canary_enabled{{{GROUP}}})", units.Short),
            "Mismatches": (f'sum {by} (kv_canary_mismatches_total{{{GROUP}, source="real"}})', units.Short),
            "Oldest verification": (f"max {by} (kv_canary_oldest_verification_age_seconds{{{GROUP}}})", units.Seconds),
            "Pages": (f"sum {by} (kv_canary_pages{{{GROUP}}})", units.Short),
            "Unknown": (f'sum {by} (kv_canary_pages{{{GROUP}, state="unknown"}})', units.Short),
            "Reads": (
                f"sum {by} (rate(kv_canary_read_bytes_total{{{GROUP}}}[$__rate_interval]))",
                units.BytesPerSecondSI,
            ),
            "Not covered": (f"sum {by} (kv_canary_uncovered_buffers{{{GROUP}}})", units.Short),
        },
        keys=["job", "instance", "group"],
        link=("Open this server", INSTANCE_URL),
    )
    colored(guarded, "On", ((None, RED), (1, GREEN)))
    colored(guarded, "Mismatches", BAD_ABOVE_0)
    built.with_panel(colored(guarded, "Oldest verification", AGE))
    built.with_panel(
        switches(
            "Switched on",
            "When each group was guarded. A gap is a server that was not scraped.",
            queries((f"max by (instance, group) (kv_canary_enabled{{{GROUP}}})", "{{instance}} {{group}}")),
        )
    )
    built.with_panel(
        graph(
            "Mismatches by check",
            "Real and rehearsed (drill) ones. A flat zero is normal. Many at once in one check speak of software.",
            queries(
                (
                    f"sum by (check, source) (increase(kv_canary_mismatches_total{{{GROUP}}}[$__rate_interval]))",
                    "{{check}} ({{source}})",
                )
            ),
            bars=True,
        )
    )

    built.with_row(dashboard.Row("How soon a fault is seen, and what that costs"))
    built.with_panel(
        graph(
            "Oldest verification",
            "The longest that a fault could have gone unseen in a page nobody claimed, by server.",
            queries(
                (f"max by (instance) (kv_canary_oldest_verification_age_seconds{{{GROUP}}})", "{{instance}}"),
            ),
            unit=units.Seconds,
        )
    )
    built.with_panel(
        graph(
            "Bytes read",
            "All that the canaries read of the KV caches. Seals and claims come on top of the budget.",
            queries(
                (
                    f"sum by (instance) (rate(kv_canary_read_bytes_total{{{GROUP}}}[$__rate_interval]))",
                    "{{instance}}",
                )
            ),
            unit=units.BytesPerSecondSI,
        )
    )
    built.with_panel(
        graph(
            "Share of the engine's thread",
            "Time in the canary's hooks on the thread that drives the engine. Below 1% is normal.",
            queries(
                (
                    f"sum by (instance) (rate(kv_canary_hook_seconds_total{{{SERVER}}}[$__rate_interval]))",
                    "{{instance}}",
                )
            ),
            unit=units.PercentUnit,
            width=8,
        )
    )
    built.with_panel(
        graph(
            "Share of the device",
            "Time in the canary's kernels. It follows the read budget.",
            queries(
                (
                    f"sum by (instance) (rate(kv_canary_kernel_seconds_total{{{SERVER}}}[$__rate_interval]))",
                    "{{instance}}",
                )
            ),
            unit=units.PercentUnit,
            width=8,
        )
    )
    return built.with_panel(
        graph(
            "Memory of the canaries",
            "Fingerprints and page tables. It grows with the cache's pages, not with time.",
            queries((f"sum by (instance) (kv_canary_memory_bytes{{{SERVER}}})", "{{instance}}")),
            unit=units.BytesSI,
            width=8,
        )
    )
