"""The same numbers by the names, labels and meanings of vLLM, for its dashboards and for routers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.types.status import DraftCounts, Stats
from server.metrics.engine_totals import batch_tokens

if TYPE_CHECKING:
    from server.metrics.engine_totals import EngineStatistics

# Tokens of a cache block for routers, vLLM's default. The cache is exact to the token: a shorter block would only make
# routers that hash a limited number of blocks see less of a prompt.
BLOCK_TOKENS = 16
# vLLM's finish reasons that have other names here.
REASONS = {"cancelled": "abort"}


class VllmCollector(Collector):
    """The engine's numbers and the observations of requests.

    histograms  by vLLM's name
    requests    generations by endpoint and finish reason
    """

    def __init__(self, engine: EngineStatistics, histograms: Mapping[str, Histogram], requests: Counter) -> None:
        self._engine, self._histograms, self._requests = engine, histograms, requests

    def collect(self) -> Iterator[Metric]:
        """One family a metric."""
        stats = self._engine.stats()
        yield from _engine_numbers(stats)
        yield _cache_config(stats.cells_total)
        yield from _drafts(stats.drafts)
        yield batch_tokens("vllm:iteration_tokens_total", stats)
        yield from (_renamed(histogram, name) for name, histogram in self._histograms.items())
        yield self._successes()

    def _successes(self) -> Metric:
        """Finished requests, by vLLM's names of the reasons."""
        counts: dict[str, float] = {}
        for sample in next(iter(self._requests.collect())).samples:
            if sample.name.endswith("_total"):
                reason = REASONS.get(sample.labels["finish_reason"], sample.labels["finish_reason"])
                counts[reason] = counts.get(reason, 0) + sample.value
        family = CounterMetricFamily("vllm:request_success", "Finished requests.", labels=["finished_reason"])
        for reason, count in counts.items():
            family.add_metric([reason], count)
        return family


def _engine_numbers(stats: Stats) -> Iterator[Metric]:
    # Cells of cached prefixes alone are free, like unreferenced blocks in vLLM.
    usage = stats.cells_used / stats.cells_total if stats.cells_total else 0.0
    yield _gauge("num_requests_running", "Requests in a slot.", stats.running)
    yield _gauge("num_requests_waiting", "Requests in the queue.", stats.waiting)
    yield _gauge("kv_cache_usage_perc", "Share of KV cells in use, from 0 to 1.", usage)
    yield _counter("prefix_cache_queries", "Prompt tokens.", stats.prompt_tokens_total)
    yield _counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.cached_tokens_total)
    yield _counter("prompt_tokens", "Prompt tokens.", stats.prompt_tokens_total)
    yield _counter("generation_tokens", "Generated tokens.", stats.generated_tokens_total)
    yield _counter("num_preemptions", "Sequences preempted to the queue.", stats.preemptions_total)


def _drafts(counts: Sequence[DraftCounts]) -> Iterator[Metric]:
    """Draft tokens of all drafters together."""
    drafted = [sum(column) for column in zip_longest(*(drafter.drafted for drafter in counts), fillvalue=0)]
    accepted = [sum(column) for column in zip_longest(*(drafter.accepted for drafter in counts), fillvalue=0)]
    # Each draft has a first position.
    yield _counter("spec_decode_num_drafts", "Drafts.", drafted[0] if drafted else 0)
    yield _counter("spec_decode_num_draft_tokens", "Draft tokens.", sum(drafted))
    yield _counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.", sum(accepted))
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    by_position = CounterMetricFamily(name, "Accepted draft tokens by position.", labels=["position"])
    for position, count in enumerate(accepted):
        by_position.add_metric([str(position)], count)
    yield by_position


def _cache_config(cells: int) -> Metric:
    sizes = {"block_size": str(BLOCK_TOKENS), "num_gpu_blocks": str(cells // BLOCK_TOKENS)}
    info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache in blocks.", labels=list(sizes))
    info.add_metric(list(sizes.values()), 1)
    return info


def _renamed(histogram: Histogram, name: str) -> Metric:
    """The samples of a histogram under another name."""
    [family] = histogram.collect()
    renamed = Metric(name, family.documentation, family.type)
    renamed.samples = [sample._replace(name=name + sample.name.removeprefix(family.name)) for sample in family.samples]
    return renamed


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"vllm:{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"vllm:{name}", text, value=value)
