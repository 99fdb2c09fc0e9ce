"""What both dashboards share: how a metric is narrowed down to the chosen servers and groups, limits, and the marks.

Only metrics that a canary exports itself: the dashboards work without the recording rules.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from panels import BLUE, GREEN, ORANGE, RED, events

SERVER = 'job=~"$job", instance=~"$instance"'
GROUP = SERVER + ', group=~"$group"'
BAD_ABOVE_0 = ((None, GREEN), (1, RED))
SILENCE = ((None, GREEN), (30, ORANGE), (60, RED))
AGE = ((None, GREEN), (60, ORANGE), (300, RED))


def mark_mismatches(built: dashboard.Dashboard) -> None:
    for source, name, color in (("real", "Mismatches", RED), ("drill", "Alert drills", BLUE)):
        increase = f'increase(kv_canary_mismatches_total{{{GROUP}, source="{source}"}}[$__rate_interval])'
        built.annotation(
            events(
                name,
                f"sum by (instance, group, check, persistence) ({increase}) > 0",
                title="Mismatch" if source == "real" else "Drill",
                text="{{check}} ({{persistence}}) in group {{group}} of {{instance}}",
                tags="check,group",
                color=color,
            )
        )
