"""Removal of models from the hub's cache, as `cellar models remove` does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.load.hub_cache import CachedModel, cached_models, remove_revisions
from server.http.errors import MODEL_NOT_FOUND, ApiError, invalid_value
from server.ollama.pull import hub_name
from server.service import Service


def remove_cached(service: Service, name: str) -> None:
    """Delete `organisation/model` or `organisation/model@revision`; ApiError for others. For a worker thread."""
    model, _, revision = hub_name(name).partition("@")
    if ":" in model:
        raise invalid_value("model", "all files of a repository are deleted together; leave out the tag")
    found = [each for each in cached_models() if each.id == model and each.revision.startswith(revision)]
    if not found:
        raise ApiError(MODEL_NOT_FOUND, f"The cache of this server has no model '{name[:128]}'.", param="model")
    if any(_is_used(each, path) for each in found for path in _used(service)):
        raise invalid_value("model", "this server uses it; stop the server first")
    remove_revisions(found)


def _used(service: Service) -> Iterator[str]:
    """Names and folders of the models in use."""
    settings, engine = service.settings, service.engine
    names = (settings.model, settings.embedding_model, settings.draft_model, engine.info.name, engine.info.folder)
    yield from filter(None, names)
    if engine.embedding is not None:
        yield engine.embedding.model.folder


def _is_used(model: CachedModel, used: str) -> bool:
    return used.partition(":")[0].partition("@")[0] == model.id or Path(used).is_relative_to(model.folder)
