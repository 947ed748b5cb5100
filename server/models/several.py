"""The registry of several models, which are loaded on demand."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from engine.client import EngineClient
from engine.config import SLOTS_OF_SEVERAL
from engine.errors import Draining, Loading, Overloaded
from engine.types.model_name import plain_name
from server.configuration.settings import Settings
from server.http.auth import caller
from server.http.errors import missing_parameter
from server.media.uploads import MediaReader
from server.metrics.metrics import Metrics, render
from server.metrics.traces import GenerationTraces
from server.models.description import Descriptions, ModelDescription
from server.models.entry import ModelEntry
from server.models.eviction import TURN_SECONDS
from server.models.folder_scan import FolderScan
from server.models.instance import Lease
from server.models.lease import LeaseCount, hold_for_request
from server.models.loader import Loader
from server.models.loader_metrics import LoaderMetrics
from server.models.presets import LATEST_TAG, Presets
from server.models.registry import MAX_NAME_LENGTH, ModelRegistry
from server.service import Service, WorkerThreads

logger = logging.getLogger("cellar")


class DuplicateName(ValueError):
    """Two models have the same name."""


@dataclass(frozen=True, slots=True)
class SelectedModel:
    """The model that the current request names, and its lease."""

    name: str
    entry: ModelEntry
    lease: Lease


# The model of the current request; set by LoadMiddleware.
selected: ContextVar[SelectedModel | None] = ContextVar("selected", default=None)


def names_of(entries: Iterable[ModelEntry]) -> dict[str, ModelEntry]:
    """The entries by all of their names. Raises DuplicateName."""
    names: dict[str, ModelEntry] = {}
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            other = names.setdefault(name, entry)
            if other is not entry:
                sources = f"{other.source or other.name} and {entry.source or entry.name}"
                raise DuplicateName(f"two models have the name {name}: {sources}; give one of them another name")
    return names


class SeveralModels(ModelRegistry):
    """The models of a loader. `settings` are those of the server; each model has its own.

    observer  observes the loader
    """

    def __init__(
        self,
        settings: Settings,
        entries: Iterable[ModelEntry],
        loader: Loader,
        observer: LoaderMetrics,
        media: MediaReader,
        traces: GenerationTraces | None = None,
    ) -> None:
        self.settings, self.presets, self.leases = settings, Presets(), LeaseCount()
        self.loader, self._observer, self._media, self._traces = loader, observer, media, traces
        self.entries = names_of(entries)
        self._metrics = {name: self._new_metrics(name) for name in loader.names}
        # By the model's name: each request has a new Service.
        self._threads = defaultdict[str, WorkerThreads](WorkerThreads)
        self._scan, self._descriptions = FolderScan(settings), Descriptions()
        self._scanned: Sequence[ModelEntry] = ()
        self.created = int(time.time())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models that generate, as far as the key of the request may use them."""
        return tuple(name for name in self.all_names if self.entries[name].kind == "generate")

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of all models that the key of the request may use."""
        return tuple(filter(caller().may_use, self.entries))

    def entry_of(self, name: str) -> ModelEntry | None:
        """The model of a requested name; None if there is none that the key of the request may use."""
        listed = self._listed_name(name)
        return self.entries[listed] if listed is not None and caller().may_use(listed) else None

    def _listed_name(self, name: str) -> str | None:
        """The name in /v1/models of the model of a requested name; None if there is none."""
        short = name.removesuffix(LATEST_TAG)
        for candidate in (name, short, plain_name(name), plain_name(short)):
            if candidate in self.entries:
                return candidate
        if self.settings.serves_any_name and 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable():
            return next(iter(self.entries), None)
        return None

    async def find(self, name: str) -> ModelEntry | None:
        """The model of a requested name, also if its files are new; None if there is none."""
        if self.entry_of(name) is None:
            await self.rescan()
        return self.entry_of(name)

    async def rescan(self) -> None:
        """Add and remove models whose files in the folder of models are new or gone, unless it was read just now."""
        entries = await self._scan.read()
        if entries is None or entries == self._scanned:
            return
        self._scanned = entries
        known = {entry.name: entry for entry in self.entries.values() if entry.scanned}
        for entry in {*known.values()} - {*entries}:
            logger.info("model %s: removed", entry.name)
            self.entries = {name: other for name, other in self.entries.items() if other is not entry}
            self.loader.remove(entry.name)
        for entry in entries:
            if known.get(entry.name) != entry:
                self._add(entry)

    def _add(self, entry: ModelEntry) -> None:
        try:
            self.entries = names_of([*dict.fromkeys(self.entries.values()), entry])
        except DuplicateName as error:
            logger.warning("%s", error)
            return
        logger.info("model %s: added", entry.name)
        self._metrics.setdefault(entry.name, self._new_metrics(entry.name))
        self.loader.add(entry)

    async def describe(self) -> Mapping[str, ModelDescription]:
        """What the files of the models say, by main name; nothing of models that are not local."""
        entries = [*dict.fromkeys(self.entries.values())]
        return await asyncio.to_thread(self._descriptions.read, entries)

    def metrics_of(self, name: str) -> Metrics:
        """The metrics of a model by its main name."""
        return self._metrics[name]

    def _new_metrics(self, name: str) -> Metrics:
        return Metrics(self._observer.totals_of(name), name)

    def embeds(self, name: str) -> bool:
        """Whether a name is of an embedding model."""
        entry = self.entry_of(name)
        return entry is not None and entry.kind == "embedding"

    def name_of_folder(self, path: str) -> str | None:
        """The name of the model of a path; None if there is none."""
        sources = {Path(entry.source).expanduser(): name for name, entry in self.entries.items() if entry.source}
        return sources.get(Path(path))

    @property
    def reads_media(self) -> bool:
        """Yes: the model of a request is not known before its body."""
        return True

    def check_admission(self, owner: str) -> None:
        """Raise Overloaded if too many requests wait for a load."""
        if self.loader.waiting >= self.loader.limits.max_waiting:
            raise Overloaded(self.loader.waiting, TURN_SECONDS)

    def reserve(self, owner: str) -> AbstractContextManager[None]:
        """Nothing: the model of a request, and so its queue, is not known before the body."""
        return nullcontext()

    async def batch_slots(self) -> int:
        """The default slots of a model: each line of a batch loads the model that it names."""
        return SLOTS_OF_SEVERAL

    @contextmanager
    def lease(self, name: str | None = None) -> Iterator[Service]:
        """The service of a loaded model; by default the one that the current request names.

        ApiError for the name of an embedding model, which generates no text.
        """
        entry = self.entry_of(name) if name else None
        if entry is not None and entry.kind == "embedding":
            raise self._no_text(entry.name)
        with self._lease(name) as service:
            yield service

    @contextmanager
    def _lease(self, name: str | None) -> Iterator[Service]:
        """The service of a model of any kind."""
        current = selected.get()
        if not name:
            if current is None:
                raise missing_parameter("model")
            # A preset's name is of no entry.
            name = current.name if self.entry_of(current.name) else current.entry.name
        entry = self.entry_of(name)
        if entry is None and current is not None and name == current.entry.name:
            # It was removed while the request is served.
            entry = current.entry
        if entry is None:
            raise self.unknown(name)
        holds = current is not None and current.entry is entry
        with current.lease.share() if current and holds else self.loader.acquire_loaded(entry.name) as engine:
            yield self.service(entry, name, engine)

    @asynccontextmanager
    async def loaded(self, name: str | None) -> AsyncGenerator[None, None]:
        """Load the model; inside the block `selected` has its lease."""
        entry = await self.find(name) if name else None
        if name is None or entry is None:
            yield
            return
        with self.hold(name, entry, await self.loader.acquire(entry.name)):
            yield

    @contextmanager
    def hold(self, name: str, entry: ModelEntry, lease: Lease) -> Iterator[None]:
        """Inside the block `selected` has the lease, which is released at its end."""
        with lease:
            token = selected.set(SelectedModel(name, entry, lease))
            try:
                yield
            finally:
                selected.reset(token)

    def use_for_embeddings(self, name: str | None) -> Service:
        """The service of the named model."""
        return self._used_by_kind(name)

    def use_for_scores(self, name: str | None) -> Service:
        """The service of the named model."""
        return self._used_by_kind(name)

    def render_metrics(self, *others: CollectorRegistry) -> bytes:
        """The text of a scrape, with the metrics of other registries."""
        models = (metrics.model_registry for metrics in self._metrics.values())
        return render([self._observer.registry, *models, *others])

    @property
    def phase(self) -> str:
        """ "ready", "draining", or "loading"."""
        if self.loader.is_draining:
            return "draining"
        return "ready" if self.can_serve else "loading"

    @property
    def can_serve(self) -> bool:
        """Whether a pinned model, or without pinned ones any model, can serve or be loaded."""
        entries = set(self.entries.values())
        pinned = {entry for entry in entries if entry.pinned}
        states = {self.loader.status(entry.name).state for entry in pinned or entries}
        return "ready" in states or not (pinned or states == {"failed"})

    @property
    def loaded_names(self) -> tuple[str, ...]:
        """The names of loaded models that the key of the request may use."""
        return tuple(name for name in self.all_names if self.loader.status(self.entries[name].name).state == "ready")

    @property
    def loaded_engines(self) -> tuple[EngineClient, ...]:
        """The engines of the loaded models."""
        engines = [self.loader.engine(name) for name in {entry.name for entry in self.entries.values()}]
        return tuple(engine for engine in engines if engine is not None and engine.ready)

    def check_ready(self) -> None:
        """Raise the error of a server that cannot accept a request now."""
        if self.loader.is_draining:
            raise Draining
        if not self.can_serve:
            raise Loading(self.phase)

    def check_alive(self) -> None:
        """Nothing: a restart would not help a model that cannot be loaded."""

    def service(self, entry: ModelEntry, name: str, engine: EngineClient) -> Service:
        """The service of an entry with its engine, under a requested name."""
        short = name.removesuffix(LATEST_TAG)
        return Service(
            engine,
            entry.settings,
            self._metrics[entry.name],
            name,
            self._traces,
            created=self.created,
            adapter=short if short in entry.settings.adapters else "",
            listed_name=self._listed_name(name) or entry.name,
            media=self._media,
            threads=self._threads[entry.name],
        )

    def _names_in_errors(self) -> tuple[str, ...]:
        return self.all_names

    def _is_adapter(self, name: str) -> bool:
        """No: adapters are names of their entries."""
        return False

    def _used_by_kind(self, name: str | None) -> Service:
        service = hold_for_request(self._lease(name))
        embedding = service.settings.embedding_name
        return service if embedding is None else replace(service, name=embedding)
