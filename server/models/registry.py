"""The one way from a name in a request to the service of its model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from engine.client import EngineClient
from engine.types.model_name import plain_name
from server.http.auth import caller
from server.http.errors import MODEL_NOT_FOUND, ApiError
from server.metrics.metrics import render
from server.models.lease import LeaseCount, hold_for_request
from server.models.presets import LATEST_TAG, Presets
from server.service import Service

# Characters of a client's own name of the model.
MAX_NAME_LENGTH = 512


class ModelRegistry:
    """The served models. There is one entry: a model, its other names, its adapters, and perhaps an embedding
    model beside it.

    presets  names that requests made for the model
    leases   by which the model is in use now
    """

    def __init__(self, service: Service) -> None:
        self.settings, self._service = service.settings, service
        self.presets, self.leases = Presets(), LeaseCount()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model that generates, the main name first, and of its loaded adapters, as far as the key of
        the request may use them."""
        engine, settings = self._service.engine, self.settings
        loaded = [adapter.name for adapter in engine.info.adapters] if engine.ready else settings.adapters
        return tuple(name for name in (*settings.model_names, *loaded) if caller().may_use(name))

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of all models that the key of the request may use."""
        embedding = self.settings.embedding_name
        return (*self.names, embedding) if embedding is not None and self.embeds(embedding) else self.names

    def served_name(self, name: str) -> str:
        """The name itself, or the served one of an address on the hub such as hf.co/organisation/model."""
        plain = plain_name(name)
        return plain if plain in self.all_names and not self._is_served(name) else name

    def without_tag(self, name: str) -> str:
        """The name without the default tag of Ollama's clients."""
        return name if self._is_served(name) else self.served_name(name.removesuffix(LATEST_TAG))

    def check_admission(self, owner: str) -> None:
        """Raise Overloaded if every request of the owner would be refused now because the queue is full."""
        self._service.engine.check_admission(owner)

    def reserve(self, owner: str) -> AbstractContextManager[None]:
        """Count a request of the owner as waiting inside the block: one that is being prepared."""
        return self._service.engine.reserve(owner)

    async def batch_slots(self) -> int:
        """The slots of a model, when it is loaded. Raises EngineError of a failed load."""
        await self._service.engine.wait_ready()
        return self._service.engine.info.slots

    @property
    def phase(self) -> str:
        """The phase of the engine."""
        return self._service.engine.phase

    @property
    def loaded_names(self) -> tuple[str, ...]:
        """The names of the loaded models."""
        return self.all_names if self._service.engine.ready else ()

    @property
    def loaded_engines(self) -> tuple[EngineClient, ...]:
        """The engines of the loaded models."""
        return (self._service.engine,) if self._service.engine.ready else ()

    def check_alive(self) -> None:
        """Raise EngineDead if a restart would help."""
        self._service.check_alive()

    def check_ready(self) -> None:
        """Raise the error of a server that cannot accept a request now."""
        self._service.check_ready()

    def render_metrics(self, *others: CollectorRegistry) -> bytes:
        """The text of a scrape, with the metrics of other registries."""
        return render([self._service.metrics.model_registry, *others])

    def embeds(self, name: str) -> bool:
        """Whether a name is of the embedding model, and the key of the request may use it."""
        return name == self.settings.embedding_name and caller().may_use(name)

    def name_of_folder(self, path: str) -> str | None:
        """The name of the model that was loaded from a path; None if there is none."""
        return self.settings.model_names[0] if Path(path) == Path(self._service.engine.info.folder) else None

    @property
    def reads_media(self) -> bool:
        """Whether the model is loaded and reads images or sounds."""
        engine = self._service.engine
        return engine.ready and len(engine.info.input_modalities) > 1

    @contextmanager
    def lease(self, name: str | None = None) -> Iterator[Service]:
        """The service of a model, under the requested name or its main one; ApiError for an unknown model.

        The model counts as used inside the block. The name of a client's own model, such as Claude Code's, is served
        by --served-model-name '*'.
        """
        with self.leases.hold():
            yield self._service_of(name)

    @asynccontextmanager
    async def loaded(self, name: str | None) -> AsyncGenerator[None, None]:
        """Inside the block the model is the one of the current request, and stays loaded; an unknown name is no error.

        Raises ApiError and EngineError of a failed load.
        """
        yield

    def use(self, name: str | None = None) -> Service:
        """The service of a model as by `lease`, until the current request has ended."""
        return hold_for_request(self.lease(name))

    def use_for_embeddings(self, name: str | None) -> Service:
        """The service for vectors: the embedding model's, if it makes some, whatever the name; else as `use`."""
        self._service.check_ready()
        if self._service.embedder is not None and self.settings.embedding_name is not None:
            return self._of_embedding(self.settings.embedding_name)
        return self.use(name)

    def use_for_scores(self, name: str | None) -> Service:
        """The service for scores of pairs: the embedding model's by its name, or by default for a reranker."""
        embedding, default = self.settings.embedding_name, name is None and self._service.reranker is not None
        named = name is not None and self.served_name(name) == embedding
        if embedding is not None and (named or default):
            return self._of_embedding(embedding)
        return self.use(name)

    def unknown(self, name: str) -> ApiError:
        """The error of a name that no model has, or none that the key of the request may use."""
        served = ", ".join(f"'{model}'" for model in self._names_in_errors()) or "none of its models"
        reason = "does not exist here. This server serves"
        if caller().models is not None:
            reason = "does not exist here, or this API key may not use it. The key may use"
        return ApiError(MODEL_NOT_FOUND, f"The model '{name[:128]}' {reason} {served}.", param="model")

    def _names_in_errors(self) -> tuple[str, ...]:
        return self.names

    def _no_text(self, name: str) -> ApiError:
        """The error of a request for text to an embedding model."""
        served = ", ".join(f"'{model}'" for model in self.names) or "another model"
        message = f"The model '{name}' is an embedding model and does not support this endpoint; use {served}."
        return ApiError(MODEL_NOT_FOUND, message, param="model")

    def _of_embedding(self, name: str) -> Service:
        return replace(self.use(), name=name, listed_name=name)

    def _service_of(self, name: str | None) -> Service:
        if not name:
            return self._service
        name = self.served_name(name)
        if name == self.settings.embedding_name:
            raise self._no_text(name) if self.embeds(name) else self.unknown(name)
        is_any_name = self.settings.serves_any_name and _may_be_name(name)
        adapter = next((option for option in (name, name.removesuffix(LATEST_TAG)) if self._is_adapter(option)), "")
        short, [main, *_] = name.removesuffix(LATEST_TAG), self.settings.model_names
        listed = adapter or (short if short in self.settings.model_names else main if is_any_name else "")
        if not listed or not caller().may_use(listed):
            raise self.unknown(name)
        return replace(self._service, name=name, adapter=adapter, listed_name=listed)

    def _is_served(self, name: str) -> bool:
        return name in self.all_names or self._is_adapter(name)

    def _is_adapter(self, name: str) -> bool:
        """Whether a name is of an adapter, and of no model."""
        names = (*self.settings.model_names, self.settings.embedding_name)
        return name not in names and self._service.engine.has_adapter(name)


def _may_be_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable()
