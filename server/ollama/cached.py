"""Removal of models from the hub's cache, as `cellar models remove` does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.client import EngineClient
from engine.errors import ModelKept
from engine.load.hub.hub_cache import find_cached, remove_revisions
from server.http.errors import MODEL_NOT_FOUND, ApiError, invalid_value
from server.ollama.pull import hub_name


def remove_cached(engines: Iterable[EngineClient], name: str) -> None:
    """Delete `organisation/model` or `organisation/model@revision`; ApiError for others, and for the models of
    `engines`. For a worker thread.
    """
    id, separator, revision = name.partition("@")
    model = hub_name(id)
    if ":" in model:
        raise invalid_value("model", "all files of a repository are deleted together; leave out the tag")
    try:
        if not (revisions := find_cached(f"{model}{separator}{revision}")):
            raise ApiError(MODEL_NOT_FOUND, f"The cache of this server has no model '{name[:128]}'.", param="model")
        remove_revisions(revisions, [folder for engine in engines for folder in _loaded(engine)])
    except ModelKept as error:
        raise invalid_value("model", error.reason) from error


def _loaded(engine: EngineClient) -> Iterator[str]:
    """Folders and GGUF files of the models of an engine."""
    yield engine.info.folder
    if engine.embedding is not None:
        yield engine.embedding.model.folder
    if engine.drafting.model is not None:
        yield engine.drafting.model.folder
