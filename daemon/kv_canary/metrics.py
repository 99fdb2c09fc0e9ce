"""The Prometheus collector: turns the newest snapshot into the metrics of `metric_table`.

Owns no state and no thread: `collect` runs on whichever thread scrapes (the HTTP thread) and reads one snapshot. An
ordinary Counter would leak into the host's multiprocess directory: none is made, and the registry is private.
`prometheus_client` decides at its import whether it is in multiprocess mode, and SGLang sets that directory after
plugins load: it is imported inside functions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from kv_canary.metric_table import ERROR_COMPONENTS, HOOK_EVENTS, KERNELS, METRICS, MetricSpec
from kv_canary.snapshot import SWEEP_DURATION_BUCKETS, Incident, Snapshot

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric
    from prometheus_client.samples import Exemplar

__all__ = [
    "ERROR_COMPONENTS",
    "HOOK_EVENTS",
    "KERNELS",
    "METRICS",
    "CanaryCollector",
    "MetricSpec",
    "metrics_registry",
]

EXEMPLAR_LIMIT = 128  # characters of all label names and values together, by the OpenMetrics specification


class CanaryCollector:
    """A prometheus_client collector over the newest snapshot. It keeps nothing between two scrapes."""

    def __init__(self, read: Callable[[], Snapshot]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        snapshot = self._read()
        for spec in METRICS:
            points = spec.points(snapshot)
            if spec.type == "counter":
                counter = CounterMetricFamily(spec.name, spec.help, labels=spec.labels)
                for point in points:
                    # Not `add_metric`: before 0.21 it takes no exemplar.
                    labels = dict(zip(spec.labels, point.labels, strict=True))
                    counter.add_sample(spec.name, labels, point.value, exemplar=_exemplar(point.incident))
                yield counter
            elif spec.type == "gauge":
                gauge = GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
                for point in points:
                    gauge.add_metric(point.labels, point.value)
                yield gauge
            else:
                histogram = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
                for point in points:
                    histogram.add_metric(point.labels, _cumulative(point.bucket_counts), point.value)
                yield histogram


def metrics_registry(read: Callable[[], Snapshot]) -> CollectorRegistry:
    """A private registry that holds the canary's collector and nothing else."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)  # describing would read a snapshot before there is one
    registry.register(CanaryCollector(read))  # a Collector in all but its base class
    return registry


def _cumulative(counts: tuple[int, ...]) -> list[tuple[str, float]]:
    """Counts a bucket, the last beyond all bounds, as Prometheus wants them: running totals with their upper bounds."""
    bounds = [*(str(bound) for bound in SWEEP_DURATION_BUCKETS), "+Inf"]
    return list(zip(bounds, accumulate(counts or (0,) * len(bounds)), strict=True))


def _exemplar(incident: Incident | None) -> Exemplar | None:
    """What leads from the alert to the incident; only OpenMetrics prints it. None when it would be over the limit."""
    if incident is None:
        return None
    from prometheus_client.samples import Exemplar

    labels = {"incident": incident.id, "page": str(incident.page)}
    if sum(len(name) + len(value) for name, value in labels.items()) > EXEMPLAR_LIMIT:
        return None
    return Exemplar(labels, 1.0, incident.found_at)
