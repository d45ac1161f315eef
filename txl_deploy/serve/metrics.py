"""What is counted, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from txl_runtime.sessions.requests import Counters

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


# Times at which counters began would be as many lines again.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """Counters of one server; those of the sessions are asked for when they are read."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._sessions = _OfSessions()
        self._registry.register(self._sessions)
        self._requests = Counter("txl_requests", "Requests answered.", ("path", "status"), registry=self._registry)
        self._seconds = Histogram(
            "txl_request_seconds",
            "From a request to the end of its answer.",
            ("path",),
            registry=self._registry,
            buckets=SECONDS,
        )
        self._first = Histogram(
            "txl_first_token_seconds", "From a request to its first token.", registry=self._registry, buckets=SECONDS
        )
        self._read = Counter("txl_prompt_tokens", "Tokens read.", registry=self._registry)
        self._drawn = Counter("txl_completion_tokens", "Tokens generated.", registry=self._registry)
        self.running = Gauge("txl_requests_running", "Requests that are being answered.", registry=self._registry)

    def answered(self, path: str, status: int, seconds: float, read: int, drawn: int, first: float | None) -> None:
        """One request has ended; `path` is that of its route, so that there are few of them."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)
        self._read.inc(read)
        self._drawn.inc(drawn)
        if first is not None:
            self._first.observe(first)

    def text(self, counters: Counters, places: Mapping[str, int]) -> bytes:
        """Everything in Prometheus' text format.

        Args:
            counters: of the sessions.
            places: how many sessions are where.
        """
        self._sessions.counters, self._sessions.places = counters, places
        return generate_latest(self._registry)


class _OfSessions:
    """What the sessions count themselves."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.places: Mapping[str, int] = {}

    def collect(self) -> Iterator[Metric]:
        """All of it, for the registry."""
        for field in fields(self.counters):
            value = getattr(self.counters, field.name)
            if isinstance(value, int):
                yield CounterMetricFamily(f"txl_sessions_{field.name}", f"Of all sessions: {field.name}.", value=value)
        ended = CounterMetricFamily(
            "txl_sessions_finished", "Requests of sessions by how they ended.", labels=["reason"]
        )
        for reason, count in self.counters.finished.items():
            ended.add_metric([reason], count)
        yield ended
        where = GaugeMetricFamily("txl_sessions_held", "Named sessions by where their memory is.", labels=["place"])
        for place, count in self.places.items():
            where.add_metric([place], count)
        yield where
