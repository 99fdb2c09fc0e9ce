"""The queries of a Grafana dashboard, and what Grafana would make of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any


def queries_of(dashboard: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every PromQL expression, with where it stands: panels, marks, and the lists of the variables."""
    for panel in dashboard["panels"]:
        for part in (panel, *panel.get("panels", ())):
            for target in part.get("targets", ()):
                yield f"{part['title']} {target['refId']}", target["expr"]
    for mark in dashboard["annotations"]["list"]:
        yield f"mark {mark['name']}", mark["expr"]


def filled_in(expression: str, values: Mapping[str, str]) -> str:
    """The expression with the variables' values in it; fails when one is left over."""
    for name, value in sorted(values.items(), reverse=True):
        expression = re.sub(rf"\$(?:\{{{name}\}}|{name}\b)", lambda _, value=value: value, expression)
    assert "$" not in expression, expression
    return expression
