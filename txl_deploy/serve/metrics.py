"""Count events, and report them in Prometheus' format."""

from __future__ import annotations

import platform
from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from txl_runtime.model import Model
from txl_runtime.sessions import Sessions

from txl_deploy.extras import version_of
from txl_deploy.serve.keeping import Keeping

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the histograms' buckets, in seconds."""
COUNTED = {
    "rounds": "Segments that were computed, each for some sessions together.",
    "positions": "Positions that sessions were fed: tokens, or steps of arrays.",
    "tokens": "Tokens that were drawn, those of requests that ended early among them.",
    "drafted": "Tokens of drafts that ran, where --lookup has the server look them up in a session's text.",
    "kept": "Tokens of drafts that came true, each of which stands for a step.",
    "requests": "Texts and runs that sessions were asked for; one HTTP request may ask for several.",
    "busy": "Times that a text or a session found no room: its client is told to come again (429), or it waits.",
    "parked": "Sessions' states that were moved from a row to host memory, because others had their turn.",
    "resumed": "Sessions' states that were moved back onto a row.",
    "expired": "Sessions that were closed because nobody used them for --idle-seconds.",
    "broken": "Sessions that ended because what they computed is no number; they are among the lost ones.",
}
"""Description of each counter of the sessions, by its name."""
LOOKED = {
    "txl_sessions_lost": "Sessions whose memory was lost, by a damaged file or the engine, or that are broken.",
    "txl_sessions_restored": "Sessions that came back from the checkpoint when the server started.",
    "txl_sessions_finished": "Texts and runs that ended, by the reason of their end.",
    "txl_sessions_held": "Named sessions by where their memory is; a new one has none yet.",
    "txl_sessions_bytes": "Bytes of the memory of parked sessions, which --session-bytes bounds.",
    "txl_requests_waiting": "Texts and runs that wait for a row, or behind another request of their session.",
    "txl_checkpoints": "Checkpoints that were tried, by whether the disk took them.",
    "txl_checkpoint_age_seconds": "Seconds since the last whole checkpoint began, or the start: what a kill loses.",
}
"""Description of each metric that is computed when it is read."""
Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)


# Without this setting, each counter has a second line with the time when it began.
prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """The counters of one server; `looked_at` reads the counters of its sessions on demand."""

    def __init__(self, model: Model) -> None:
        self._registry = own = prometheus.CollectorRegistry()
        self._looked: Iterable[Metric] = ()
        own.register(self)
        prometheus.ProcessCollector(registry=own)  # memory, processor time and open files, on systems that report them
        build = {"model_id": model.manifest.model_id, "precision": model.manifest.precision}
        build |= {"backend": model.backend.description, "python": platform.python_version()}
        prometheus.Info("txl_build", "What runs here: versions, the model and its backend.", registry=own).info(
            {"version": version_of("txl-deploy"), **build}
        )
        description = "HTTP requests that were answered, by route and status; 499 where the client did not wait."
        self._requests = prometheus.Counter("txl_requests", description, ("path", "status"), registry=own)
        description = "Seconds from an HTTP request to the end of its answer, by route."
        self._seconds = prometheus.Histogram(
            "txl_request_seconds", description, ("path",), registry=own, buckets=SECONDS
        )
        description = "Seconds from the request of a completion to the first token that is drawn for it."
        self._first = prometheus.Histogram("txl_first_token_seconds", description, registry=own, buckets=SECONDS)
        self._read = prometheus.Counter("txl_prompt_tokens", "Tokens of prompts that HTTP requests sent.", registry=own)
        description = "Tokens that were drawn for answers to HTTP requests."
        self._drawn = prometheus.Counter("txl_completion_tokens", description, registry=own)
        description = "HTTP requests that are being answered now, the one that reads this among them."
        self.running = prometheus.Gauge("txl_requests_running", description, registry=own)

    def answered(self, path: str, status: int, seconds: float, read: int, drawn: int, first: float | None) -> None:
        """Count a request that has ended; `path` is the route's pattern, so that Prometheus gets few label values."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)
        self._read.inc(read)
        self._drawn.inc(drawn)
        if first is not None:
            self._first.observe(first)

    def text(self, looked: Iterable[Metric]) -> bytes:
        """Return all metrics in Prometheus' text format; `looked` are the metrics that were read on demand."""
        self._looked = looked
        return prometheus.generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Return the metrics that were read on demand; Prometheus' registry calls this."""
        return self._looked


def looked_at(sessions: Sessions, keeping: Keeping) -> list[Metric]:
    """Read the counters of the sessions and of their checkpoint; must be called in the sessions' thread."""
    counters = sessions.counters
    places = Tally({"row": 0, "host": 0, "new": 0})
    places.update(sessions.info(name).place for name in sessions.names())
    parked = {"host": sessions.host_bytes}
    metrics: list[Metric] = [
        CounterMetricFamily(f"txl_sessions_{name}", description, value=getattr(counters, name))
        for name, description in COUNTED.items()
    ]
    metrics.append(_family(CounterMetricFamily, "txl_sessions_lost", sessions.lost + keeping.lost))
    metrics.append(_family(GaugeMetricFamily, "txl_sessions_restored", keeping.restored))
    metrics.append(_family(CounterMetricFamily, "txl_sessions_finished", counters.finished, "reason"))
    metrics.append(_family(GaugeMetricFamily, "txl_sessions_held", places, "place"))
    metrics.append(_family(GaugeMetricFamily, "txl_sessions_bytes", parked, "place"))
    metrics.append(_family(GaugeMetricFamily, "txl_requests_waiting", sessions.waiting))
    if (age := keeping.age) is not None:
        tried = {"written": keeping.written, "failed": keeping.failed}
        metrics.append(_family(CounterMetricFamily, "txl_checkpoints", tried, "result"))
        metrics.append(_family(GaugeMetricFamily, "txl_checkpoint_age_seconds", age))
    return metrics


def _family(kind: type[Family], name: str, value: float | Mapping[Any, int], label: str = "") -> Family:
    """Make a metric with one value, or with a value for each word of a label."""
    if not isinstance(value, Mapping):
        return kind(name, LOOKED[name], value=value)
    family = kind(name, LOOKED[name], labels=[label])
    for word, count in value.items():
        family.add_metric([word], count)
    return family
