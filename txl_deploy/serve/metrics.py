"""What is counted, as Prometheus reads it."""

from __future__ import annotations

import platform
from collections import Counter as Tally
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from txl_runtime.model import Model
from txl_runtime.sessions import Sessions
from txl_runtime.sessions.requests import Counters

from txl_deploy.serve.keeping import Keeping

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
COUNTED = {
    "rounds": "Segments that were computed, each for some sessions together.",
    "positions": "Positions that sessions were fed: tokens, or steps of arrays.",
    "tokens": "Tokens that were drawn, those of requests that ended early among them.",
    "requests": "Texts and runs that sessions were asked for; one HTTP request may ask for several.",
    "busy": "Times that a request or a new session found no room; its client is told to come again (429).",
    "parked": "Sessions' states that were moved from a row to host memory, because others had their turn.",
    "resumed": "Sessions' states that were moved back onto a row.",
    "expired": "Sessions that were closed because nobody used them for --idle-seconds.",
    "broken": "Sessions that ended because what they computed is no number; they are among the lost ones.",
}
"""What each counter of the sessions is, by its name."""


# Times at which counters began would be as many lines again.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Standing:
    """How the sessions of a server stand at one moment.

    Attributes:
        counters: what was done so far.
        places: how many named sessions are where.
        nbytes: bytes of parked states by where they are.
        waiting: requests that are on no row.
        lost: sessions whose memory was lost since the start.
    """

    counters: Counters
    places: Mapping[str, int]
    nbytes: Mapping[str, int]
    waiting: int
    lost: int

    @classmethod
    def of(cls, sessions: Sessions) -> Standing:
        """That of these sessions now."""
        places = Tally({"row": 0, "host": 0, "disk": 0, "new": 0})
        places.update(sessions.info(name).place for name in sessions.names())
        nbytes = {"host": sessions.host_bytes, "disk": sessions.disk_bytes}
        return cls(sessions.counters, places, nbytes, sessions.waiting, sessions.lost)


class Metrics:
    """Counters of one server; what its sessions count is looked at when it is read.

    Args:
        model: that it serves.
    """

    def __init__(self, model: Model) -> None:
        self._registry = CollectorRegistry()
        self._looked: tuple[Standing, Keeping]  # by whoever reads
        self._registry.register(self)  # what is not counted here is looked at by `collect`
        ProcessCollector(registry=self._registry)  # memory, processor time and open files, where the system tells them
        Info("txl_build", "What runs here: versions, the model and its backend.", registry=self._registry).info(
            {
                "version": version("txl-deploy"),
                "python": platform.python_version(),
                "model_id": model.manifest.model_id,
                "precision": model.manifest.precision,
                "backend": model.backend.description,
            }
        )
        self._requests = Counter(
            "txl_requests",
            "HTTP requests that were answered, by route and status; 499 where the client did not wait.",
            ("path", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "txl_request_seconds",
            "Seconds from an HTTP request to the end of its answer, by route.",
            ("path",),
            registry=self._registry,
            buckets=SECONDS,
        )
        self._first = Histogram(
            "txl_first_token_seconds",
            "Seconds from a completion's request to the first token that is drawn for it.",
            registry=self._registry,
            buckets=SECONDS,
        )
        self._read = Counter("txl_prompt_tokens", "Tokens of prompts that HTTP requests sent.", registry=self._registry)
        self._drawn = Counter(
            "txl_completion_tokens", "Tokens that were drawn for answers to HTTP requests.", registry=self._registry
        )
        self.running = Gauge(
            "txl_requests_running",
            "HTTP requests that are being answered now, the one that reads this among them.",
            registry=self._registry,
        )

    def answered(self, path: str, status: int, seconds: float, read: int, drawn: int, first: float | None) -> None:
        """One request has ended; `path` is that of its route, so that there are few of them."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)
        self._read.inc(read)
        self._drawn.inc(drawn)
        if first is not None:
            self._first.observe(first)

    def text(self, standing: Standing, keeping: Keeping) -> bytes:
        """Everything in Prometheus' text format.

        Args:
            standing: of the sessions.
            keeping: their checkpoint.
        """
        self._looked = (standing, keeping)
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What the sessions and their checkpoint count themselves, for the registry."""
        standing, keeping = self._looked
        for name, help in COUNTED.items():
            yield CounterMetricFamily(f"txl_sessions_{name}", help, value=getattr(standing.counters, name))
        yield CounterMetricFamily(
            "txl_sessions_lost",
            "Sessions whose memory was lost: by a damaged file at the start, by the disk or the engine, or broken.",
            value=standing.lost + keeping.lost,
        )
        yield GaugeMetricFamily(
            "txl_sessions_restored",
            "Sessions that came back from the checkpoint when the server started.",
            value=keeping.restored,
        )
        yield _labelled(
            CounterMetricFamily,
            "txl_sessions_finished",
            "Texts and runs that ended, by the reason of their end.",
            "reason",
            standing.counters.finished,
        )
        yield _labelled(
            GaugeMetricFamily,
            "txl_sessions_held",
            "Named sessions by where their memory is: on a row, parked in host memory or on disk, or new without any.",
            "place",
            standing.places,
        )
        yield _labelled(
            GaugeMetricFamily,
            "txl_sessions_bytes",
            "Bytes of parked sessions' memory, in host memory (--session-bytes bounds it) and on disk (--disk-bytes).",
            "place",
            standing.nbytes,
        )
        yield GaugeMetricFamily(
            "txl_requests_waiting",
            "Texts and runs that are on no row now: they wait for one, or behind another request of their session.",
            value=standing.waiting,
        )
        if (age := keeping.age) is not None:
            yield GaugeMetricFamily(
                "txl_checkpoint_age_seconds",
                "Seconds since the last whole checkpoint began, or since the start: a kill loses what came after it.",
                value=age,
            )
            results = {"written": keeping.written, "failed": keeping.failed}
            yield _labelled(
                CounterMetricFamily,
                "txl_checkpoints",
                "Checkpoints that were tried, by whether the disk took them.",
                "result",
                results,
            )


Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)


def _labelled(kind: type[Family], name: str, help: str, label: str, values: Mapping[Any, int]) -> Family:
    """A metric with one label and a value for each of its words."""
    family = kind(name, help, labels=[label])
    for word, value in values.items():
        family.add_metric([word], value)
    return family
