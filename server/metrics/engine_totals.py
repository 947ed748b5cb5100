"""The engine's numbers, read from `engine.stats()` at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.types.status import BATCH_BUCKETS, DraftCounts, EncoderCounts, Stats


class EngineStatistics(Protocol):
    """The part of an engine that metrics are read from."""

    @property
    def alive(self) -> bool:
        """Whether the engine makes progress."""

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""

    def stats(self) -> Stats:
        """The statistics after the last step."""


class EngineCollector(Collector):
    """The engine's totals, read at each scrape."""

    def __init__(self, engine: EngineStatistics) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """One family a metric."""
        stats = self._engine.stats()
        yield _gauge("engine_up", "1 while the engine thread is alive.", float(self._engine.alive))
        yield _gauge("engine_ready", "1 while requests are accepted.", float(self._engine.ready))
        yield from _gauges(stats)
        yield from _counters(stats)
        yield batch_tokens("cellar_batch_tokens", stats)
        yield from _drafts(stats.drafts)
        yield from _encoders(stats.encoders)


def batch_tokens(name: str, stats: Stats) -> Metric:
    """The histogram of the tokens of a forward pass."""
    bounds = [*map(str, BATCH_BUCKETS), "+Inf"]
    buckets = list(zip(bounds, accumulate(stats.batch_sizes), strict=True))
    return HistogramMetricFamily(name, "Tokens of a forward pass.", buckets=buckets, sum_value=stats.batch_tokens_total)


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
    yield _gauge("adapters_loaded", "LoRA adapters that requests can name.", stats.adapters)
    yield _gauge("adapters_memory_bytes", "LoRA adapters in memory.", stats.adapter_bytes)
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
    yield _counter("time_slices", "Sequences queued again at the end of a time slice.", stats.time_slices_total)
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
    for drafter in counts:
        for position, (drafts, right) in enumerate(zip(drafter.drafted, drafter.accepted, strict=True), start=1):
            drafted.add_metric((drafter.kind, str(position)), drafts)
            accepted.add_metric((drafter.kind, str(position)), right)
    yield from (drafted, accepted)


def _encoders(counts: Sequence[EncoderCounts]) -> Iterator[Metric]:
    """By the kind of content."""
    encodings = CounterMetricFamily("cellar_encoder_encodings", "Encoded images and sounds.", labels=("kind",))
    seconds = CounterMetricFamily("cellar_encoder_seconds", "Time in the encoder.", labels=("kind",))
    hits = CounterMetricFamily(
        "cellar_encoder_cache_hits", "Images and sounds found in the encoder cache.", labels=("kind", "tier")
    )
    for encoder in counts:
        encodings.add_metric((encoder.kind,), encoder.encodings_total)
        seconds.add_metric((encoder.kind,), encoder.seconds_total)
        hits.add_metric((encoder.kind, "memory"), encoder.memory_hits_total)
        hits.add_metric((encoder.kind, "disk"), encoder.disk_hits_total)
    yield from (encodings, seconds, hits)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"cellar_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"cellar_{name}", text, value=value)
