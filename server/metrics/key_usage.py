"""Counters by API key: requests, tokens and refusals of each configured owner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

RefusalReason = Literal["scope_required", "key_limit_reached", "queue_full"]


class KeyUsage:
    """The counters of a server with keys. The label `key` is that of the log: an organisation or a shortened digest."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests that need the scope use.")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts, cached ones included.")
        self._generated_tokens = self._counter("generation_tokens", "Tokens of answers.")
        self._refusals = self._counter("refusals", "Refused requests by reason.", "reason")

    def count_request(self, key: str) -> None:
        """Count a request, refused or not."""
        self._requests.labels(key).inc()

    def count_tokens(self, key: str, prompt: int, generated: int) -> None:
        """Count tokens of a prompt and an answer."""
        self._prompt_tokens.labels(key).inc(prompt)
        self._generated_tokens.labels(key).inc(generated)

    def count_refusal(self, key: str, reason: RefusalReason) -> None:
        """Count a refused request."""
        self._refusals.labels(key, reason).inc()

    def registry(self, key: str | None = None) -> CollectorRegistry:
        """The counters of one key, or of all."""
        if key is None:
            return self._registry
        registry = CollectorRegistry()
        registry.register(_SamplesOfKey(self._registry, key))
        return registry

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"cellar_key_{name}", text, ("key", *labels), registry=self._registry)


class _SamplesOfKey(Collector):
    def __init__(self, registry: CollectorRegistry, key: str) -> None:
        self._registry, self._key = registry, key

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if sample.labels["key"] == self._key]
            yield family
