"""Prometheus metrics: one registry for each app; label values come from closed sets, never from a request.

Requests and their times are observed here, as events pass; totals of the engine are read from `engine.stats()` at each
scrape.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from server.metrics.engine_totals import EngineCollector
from server.metrics.timer import GenerationTimer, RequestHistograms
from server.metrics.vllm import VllmCollector

if TYPE_CHECKING:
    from server.metrics.engine_totals import EngineStatistics

Endpoint = Literal[
    "chat",
    "completions",
    "ollama",
    "responses",
    "anthropic",
    "embeddings",
    "rerank",
    "score",
    "decisions",
    "transcriptions",
]

TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
LENGTH_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class Metrics:
    """The registry and the observations of one app. All metrics of the model have the label `model_name`."""

    def __init__(self, engine: EngineStatistics, model_name: str) -> None:
        self.model_registry, self._own, vllm = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
        self._own.register(EngineCollector(engine))
        self._responses = self._counter("http_responses", "Responses by route and status.", ("route", "status"))
        self._requests = self._counter("requests", "Generations by finish reason.", ("endpoint", "finish_reason"))
        self._adapters = self._counter("adapter_requests", "Generations by LoRA adapter.", ("adapter",))
        self._total = self._seconds("e2e_request_latency", "From admission to the last event.")
        self._histograms = RequestHistograms(
            queue=self._seconds("queue_time", "From admission to a slot."),
            prefill=self._seconds("prefill_time", "From a slot to the first token."),
            decode=self._seconds("decode_time", "From the first token to the last one."),
            first_token=self._seconds("time_to_first_token", "From admission to the first text."),
            inter_token=self._histogram(
                "inter_token_latency_seconds", "Between two tokens of one generation.", TOKEN_BUCKETS
            ),
            prompt_tokens=self._histogram("request_prompt_tokens", "Tokens of a prompt.", LENGTH_BUCKETS),
            generated_tokens=self._histogram("request_generation_tokens", "Tokens of an answer.", LENGTH_BUCKETS),
        )
        vllm.register(VllmCollector(engine, self._vllm_names(), self._requests))
        self.model_registry.register(ConstantLabels(self._own, {"model_name": model_name}))
        self.model_registry.register(ConstantLabels(vllm, {"model_name": model_name, "engine": "0"}))

    def count_response(self, route: str, status: int) -> None:
        """Count one HTTP response; `route` is the path template, status 0 a client that disconnected before it."""
        self._responses.labels(route, str(status)).inc()

    def count_adapter(self, adapter: str) -> None:
        """Count a generation with an adapter."""
        self._adapters.labels(adapter).inc()

    @contextmanager
    def observe(self, endpoint: Endpoint) -> Iterator[GenerationTimer]:
        """Observe one generation, which ends with the block; the caller passes its events to the timer."""
        timer = GenerationTimer(self._histograms)
        try:
            yield timer
        finally:
            timer.flush()
            self._requests.labels(endpoint, timer.reason).inc()
            self._total.observe(time.monotonic() - timer.started)

    def _vllm_names(self) -> dict[str, Histogram]:
        histograms = self._histograms
        return {
            "vllm:time_to_first_token_seconds": histograms.first_token,
            "vllm:inter_token_latency_seconds": histograms.inter_token,
            "vllm:e2e_request_latency_seconds": self._total,
            "vllm:request_queue_time_seconds": histograms.queue,
            "vllm:request_prefill_time_seconds": histograms.prefill,
            "vllm:request_decode_time_seconds": histograms.decode,
            "vllm:request_prompt_tokens": histograms.prompt_tokens,
            "vllm:request_generation_tokens": histograms.generated_tokens,
            # Of the sequences of a request: here each choice is a separate request.
            "vllm:request_max_num_generation_tokens": histograms.generated_tokens,
        }

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"cellar_{name}", text, labels, registry=self._own)

    def _seconds(self, name: str, text: str) -> Histogram:
        return self._histogram(f"{name}_seconds", text, REQUEST_BUCKETS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"cellar_{name}", text, buckets=buckets, registry=self._own)


def render(registries: Sequence[CollectorRegistry]) -> bytes:
    """The text of a scrape: the registries, whose families of one name are merged, and the numbers of the process."""
    scraped = CollectorRegistry()
    scraped.register(MergedFamilies(registries))
    ProcessCollector(registry=scraped)
    GCCollector(registry=scraped)
    return generate_latest(scraped)


class MergedFamilies(Collector):
    """The metrics of several registries: a family has the samples of all, since Prometheus refuses a second one."""

    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        """One family a metric."""
        families: dict[str, Metric] = {}
        for registry in self._registries:
            for family in registry.collect():
                first = families.setdefault(family.name, family)
                if first is not family:
                    first.samples += family.samples
        yield from families.values()


class ConstantLabels(Collector):
    """The metrics of a registry with further labels."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry, self._labels = registry, labels

    def collect(self) -> Iterator[Metric]:
        """One family a metric."""
        for family in self._registry.collect():
            family.samples = [sample._replace(labels={**sample.labels, **self._labels}) for sample in family.samples]
            yield family
