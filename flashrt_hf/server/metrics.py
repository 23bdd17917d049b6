"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.02, 0.05, 0.1, 0.5, 2)


class Metrics:
    """Counters and histograms; ``text`` is what ``/metrics`` answers."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry

        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(f"flashrt_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"flashrt_{name}_seconds", text, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests answered", ("endpoint", "status"))
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.tokens = counter("generated_tokens", "Tokens generated and sent")
        self.cancelled = counter("cancelled_sequences", "Sequences that their clients gave up")
        self.failures = counter("model_failures", "Failures of the model", ("kind",))
        self.queue_seconds = histogram("queue", "Wait for a slot")
        self.first_token_seconds = histogram("time_to_first_token", "Arrival to first token")
        self.token_seconds = histogram("inter_token", "From one token to the next", TOKEN_SECONDS)
        self.request_seconds = histogram("request", "Arrival to the end of the answer")

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        Gauge(f"flashrt_{name}", text, registry=self._registry).set_function(read)

    def totals(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Counters that somebody else keeps, by name."""
        self._registry.register(_Totals(read))

    def text(self) -> bytes:
        """Everything in the text format."""
        return generate_latest(self._registry)


class _Totals(Collector):
    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        for name, value in self._read().items():
            text = name.replace("_", " ").capitalize()
            yield CounterMetricFamily(f"flashrt_{name}", text, value=value)
