"""Metrics of models that are loaded on demand: states, loads, unloads, memory, and totals that survive unloads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.client import EngineClient
from engine.types.status import Stats
from server.metrics.stats_sum import only_totals, with_totals
from server.models.entry import State
from server.models.instance import UnloadReason
from server.models.loader import Loader

LOAD_BUCKETS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)


class LoaderMetrics:
    """The observer of a loader, and the registry of its metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._loads = Counter(
            "cellar_model_loads", "Loads by outcome.", ("model_name", "outcome"), registry=self.registry
        )
        self._seconds = Histogram(
            "cellar_model_load_seconds",
            "Time of a load.",
            ("model_name",),
            buckets=LOAD_BUCKETS,
            registry=self.registry,
        )
        self._unloads = Counter(
            "cellar_model_unloads", "Unloads by reason.", ("model_name", "reason"), registry=self.registry
        )
        self._totals: dict[str, ModelTotals] = {}
        self._loader: Loader | None = None

    def loaded(self, model: str, outcome: str, seconds: float) -> None:
        """Count a load."""
        self._loads.labels(model, outcome).inc()
        if outcome == "ready":
            self._seconds.labels(model).observe(seconds)
        self.totals_of(model).refresh()

    def unloaded(self, model: str, reason: UnloadReason) -> None:
        """Count an unload."""
        self._unloads.labels(model, reason).inc()
        self.totals_of(model).refresh()

    def observe(self, loader: Loader) -> None:
        """Read the states of the models from the loader at each scrape."""
        self._loader = loader
        self.registry.register(StateCollector(loader))

    def totals_of(self, model: str) -> ModelTotals:
        """The statistics of a model, which go on if it is removed and added again."""
        assert self._loader is not None, "a loader is observed"
        return self._totals.setdefault(model, ModelTotals(self._loader, model))


class StateCollector(Collector):
    """The states of the models, read at each scrape."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def collect(self) -> Iterator[Metric]:
        """One family a metric."""
        text = "1 for the state of the model."
        states = GaugeMetricFamily("cellar_model_state", text, labels=("model_name", "state"))
        memory = GaugeMetricFamily("cellar_models_memory_bytes", "Memory granted to models.", labels=("model_name",))
        for model in self._loader.names:
            status = self._loader.status(model)
            for state in get_args(State):
                states.add_metric((model, state), float(state == status.state))
            memory.add_metric((model,), status.memory_bytes)
        yield from (states, memory)


class ModelTotals:
    """The statistics of a model; totals include its ended processes."""

    def __init__(self, loader: Loader, model: str) -> None:
        self._loader, self._model = loader, model
        self._engine: EngineClient | None = None
        self._ended = Stats()

    @property
    def alive(self) -> bool:
        """Whether the model can serve or be loaded."""
        return self._loader.status(self._model).state != "failed"

    @property
    def ready(self) -> bool:
        """Whether the model is loaded."""
        return self._loader.status(self._model).state == "ready"

    def refresh(self) -> None:
        """Note the process of the model, and the last totals of the one before."""
        engine = self._loader.engine(self._model)
        if engine is not self._engine and self._engine is not None:
            self._ended = only_totals(with_totals(self._engine.stats(), self._ended))
        self._engine = engine

    def stats(self) -> Stats:
        """The statistics of the process, if there is one, and all totals."""
        self.refresh()
        return with_totals(Stats() if self._engine is None else self._engine.stats(), self._ended)
