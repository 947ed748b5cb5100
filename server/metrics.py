"""Prometheus metrics: one registry for each app; label values come from closed sets, never from a request.

Requests and their times are observed here, as events pass; totals of the engine are read from `engine.stats()` at each
scrape.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.types.events import Delta, Event, Failed, Finished, Started
from engine.types.status import DraftCounts, Stats

if TYPE_CHECKING:
    from engine.engine import Engine

Endpoint = Literal[
    "chat", "completions", "ollama", "responses", "anthropic", "embeddings", "rerank", "score", "decisions"
]

TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
# Tokens of a cache block for routers, vLLM's default. The cache is exact to the token: a shorter block would only make
# routers that hash a limited number of blocks see less of a prompt.
BLOCK_TOKENS = 16
REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """The registry and the observations of one app."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine))
        self.registry.register(VllmCollector(engine, model_name))
        self._responses = self._counter("http_responses", "Responses by route and status.", ("route", "status"))
        self._requests = self._counter("requests", "Generations by finish reason.", ("endpoint", "finish_reason"))
        self._first_token = self._histogram("time_to_first_token", "From admission to the first text.", REQUEST_BUCKETS)
        self._inter_token = self._histogram(
            "inter_token_latency", "Between two tokens of one generation.", TOKEN_BUCKETS
        )
        self._total = self._histogram("e2e_request_latency", "From admission to the last event.", REQUEST_BUCKETS)
        self._queue = self._histogram("queue_time", "From admission to a slot.", REQUEST_BUCKETS)

    def count_response(self, route: str, status: int) -> None:
        """Count one HTTP response; `route` is the path template, status 0 a client that disconnected before it."""
        self._responses.labels(route, str(status)).inc()

    @contextmanager
    def observe(self, endpoint: Endpoint) -> Iterator[GenerationTimer]:
        """Observe one generation, which ends with the block; the caller passes its events to the timer."""
        timer = GenerationTimer(self._queue, self._first_token, self._inter_token)
        try:
            yield timer
        finally:
            timer.flush()
            self._requests.labels(endpoint, timer.reason).inc()
            self._total.observe(time.monotonic() - timer.started)

    def render(self) -> bytes:
        """The text of a scrape."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"cellar_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"cellar_{name}_seconds", text, buckets=buckets, registry=self.registry)


# Between two steps the processor caches hold none of a histogram's code: one observation takes 20 microseconds then,
# and a batch of them hardly more.
OBSERVATION_BATCH = 32


class GenerationTimer:
    """The times of one generation: queue time, time to first token, inter-token latency.

    Inter-token latencies are added to their histogram in batches, the last batch by `flush`.
    """

    def __init__(self, queue: Histogram, first: Histogram, between: Histogram) -> None:
        self._queue, self._first_token, self._inter_token = queue, first, between
        self.started = time.monotonic()
        self.reason = "cancelled"
        self._latest: float | None = None
        self._pending: list[float] = []

    def flush(self) -> None:
        """Add pending latencies to their histogram."""
        for seconds in self._pending:
            self._inter_token.observe(seconds)
        self._pending.clear()

    def observe(self, event: Event) -> None:
        """Observe an event."""
        match event:
            case Delta():
                self.observe_delta(event)
            case Started():
                self._queue.observe(time.monotonic() - self.started)
            case Finished():
                self.reason = event.reason
            case Failed():
                self.reason = "error"

    def observe_delta(self, delta: Delta) -> None:
        """Observe a delta."""
        now, tokens = time.monotonic(), len(delta.tokens)
        if self._latest is None:
            self._first_token.observe(now - self.started)
        elif tokens:
            # A merged delta, of a slow reader, counts with its mean latency.
            self._pending.append((now - self._latest) / tokens)
            if len(self._pending) == OBSERVATION_BATCH:
                self.flush()
        self._latest = now


class EngineCollector(Collector):
    """The engine's totals, read at each scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """One family a metric."""
        stats = self._engine.stats()
        yield _gauge("engine_up", "1 while the engine thread is alive.", float(self._engine.alive))
        yield _gauge("engine_ready", "1 while requests are accepted.", float(self._engine.ready))
        yield from _gauges(stats)
        yield from _counters(stats)
        yield from _drafts(stats.drafts)


class VllmCollector(Collector):
    """Numbers that routers read, by the names, labels and meanings of vLLM."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """One family a metric."""
        stats = self._engine.stats()
        # Cells of cached prefixes alone are free, like unreferenced blocks in vLLM.
        usage = stats.cells_used / stats.cells_total if stats.cells_total else 0.0
        yield self._gauge("num_requests_running", "Requests in a slot.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", stats.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV cells in use, from 0 to 1.", usage)
        yield self._cache_config(stats.cells_total)
        yield self._counter("prefix_cache_queries", "Prompt tokens.", stats.prompt_tokens_total)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.cached_tokens_total)
        yield self._counter("prompt_tokens", "Prompt tokens.", stats.prompt_tokens_total)
        yield self._counter("generation_tokens", "Generated tokens.", stats.generated_tokens_total)
        yield self._counter("num_preemptions", "Sequences preempted to the queue.", stats.preemptions_total)

    def _cache_config(self, cells: int) -> Metric:
        sizes = {"block_size": str(BLOCK_TOKENS), "num_gpu_blocks": str(cells // BLOCK_TOKENS)}
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache in blocks.", labels=[*self._labels, *sizes])
        info.add_metric([*self._labels.values(), *sizes.values()], 1)
        return info

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


def _gauges(stats: Stats) -> Iterator[Metric]:
    usage = stats.cells_used / stats.cells_total if stats.cells_total else 0.0
    yield _gauge("requests_running", "Requests in a slot.", stats.running)
    yield _gauge("requests_waiting", "Requests in the queue.", stats.waiting)
    yield _gauge("slots", "Slots.", stats.slots)
    yield _gauge("slots_busy", "Slots in use.", stats.running)
    yield _gauge("kv_cache_usage_ratio", "Share of KV cells in use.", usage)
    yield _gauge("kv_cache_cells", "KV cells.", stats.cells_total)
    yield _gauge("kv_cache_cells_remembered", "KV cells of cached prefixes, evictable.", stats.cells_cached)
    yield _gauge("shelf_memory_bytes", "Evicted prefixes in host memory.", stats.host_cache_bytes)
    yield _gauge("shelf_disk_bytes", "Cached prefixes in the disk cache.", stats.disk_cache_bytes)
    yield _gauge("embedding_texts_waiting", "Texts in the queue of the embedding model.", stats.embedding.waiting)


def _counters(stats: Stats) -> Iterator[Metric]:
    yield _counter("prompt_tokens", "Prompt tokens.", stats.prompt_tokens_total)
    yield _counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", stats.cached_tokens_total)
    yield _counter("generation_tokens", "Generated tokens.", stats.generated_tokens_total)
    yield _counter("steps", "Forward passes.", stats.steps_total)
    yield _counter("step_seconds", "Time in forward passes.", stats.step_seconds_total)
    yield _counter("step_rows", "Batch tokens of forward passes.", stats.batch_tokens_total)
    yield _counter("context_shifts", "Context shifts.", stats.context_shifts_total)
    yield _counter("preemptions", "Sequences preempted to the queue.", stats.preemptions_total)
    yield _counter("prefix_hits", "Requests with a cached prefix.", stats.prefix_hits_total)
    yield _counter("kv_cache_evicted_tokens", "Tokens evicted from the prefix cache.", stats.evicted_tokens_total)
    yield _counter(
        "kv_cache_thinned_tokens",
        "Tokens trimmed from the prefix cache, except the ends of their ranges.",
        stats.trimmed_tokens_total,
    )
    yield _counter(
        "shelf_loaded_tokens", "Evicted tokens loaded from host memory or the disk cache.", stats.loaded_tokens_total
    )
    yield _counter("shelf_saved_tokens", "Tokens written to the disk cache.", stats.written_tokens_total)
    yield _counter("sequences_failed", "Failed sequences.", stats.failed_total)
    yield _counter("embedding_texts", "Texts computed by the embedding model.", stats.embedding.texts_total)
    yield _counter("embedding_tokens", "Tokens computed by the embedding model.", stats.embedding.tokens_total)
    yield _counter("embedding_batches", "Forward passes of the embedding model.", stats.embedding.batches_total)
    yield _counter("embedding_seconds", "Time in forward passes of the embedding model.", stats.embedding.seconds_total)


def _drafts(counts: Sequence[DraftCounts]) -> Iterator[Metric]:
    """By the kind of drafter and the position in a draft, 1 to MAX_DRAFT_TOKENS."""
    labels = ("drafter", "position")
    drafted = CounterMetricFamily("cellar_draft_tokens", "Draft tokens.", labels=labels)
    accepted = CounterMetricFamily("cellar_draft_accepted_tokens", "Accepted draft tokens.", labels=labels)
    for each in counts:
        for position, (offered, right) in enumerate(zip(each.drafted, each.accepted, strict=True), start=1):
            drafted.add_metric((each.kind, str(position)), offered)
            accepted.add_metric((each.kind, str(position)), right)
    yield from (drafted, accepted)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"cellar_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"cellar_{name}", text, value=value)
