"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fastapi import FastAPI
from starlette.responses import Response

from engine.types.status import ModelInfo
from server.http.encoding import JsonResponse
from server.models.description import ModelDescription
from server.models.entry import State
from server.models.registry import ModelRegistry
from server.models.several import SeveralModels
from server.routes.openapi import ERROR_RESPONSES
from server.schemas.models import AdapterMeta, Model, ModelList, ModelState, OptionalMeta
from server.service import Service

# The states by llama.cpp's names.
STATE_NAMES: dict[State, Literal["unloaded", "loading", "loaded", "failed"]] = {
    "unloaded": "unloaded",
    "queued": "loading",
    "loading": "loading",
    "ready": "loaded",
    "draining": "loaded",
    "failed": "failed",
}


def add(app: FastAPI, models: ModelRegistry) -> None:
    """Add the routes."""

    @app.get("/v1/models", responses={**ERROR_RESPONSES, 200: {"model": ModelList}})
    async def list_models() -> Response:
        """List the names of the models."""
        if isinstance(models, SeveralModels):
            await models.rescan()
            described = await models.describe()
            listed = [_entry_of_several(models, name, described) for name in models.all_names]
        else:
            listed = [_model(models.use(), name) for name in models.all_names]
        return JsonResponse(ModelList(object="list", data=listed))

    # Hub ids contain a slash.
    @app.get("/v1/models/{model:path}", responses={**ERROR_RESPONSES, 200: {"model": Model}})
    async def retrieve_model(model: str) -> Response:
        """Describe a model by one of its names."""
        if isinstance(models, SeveralModels):
            await models.find(model)
            return JsonResponse(_entry_of_several(models, model, await models.describe()))
        model = models.served_name(model)
        service = models.use(None if models.embeds(model) else model)
        return JsonResponse(_model(service, model))


def _model(service: Service, name: str) -> Model:
    service.check_ready()
    embedding = service.engine.embedding
    if embedding is not None and name == service.settings.embedding_name:
        return _model_entry(service, name, name, embedding.model, {"n_embd": embedding.dimensions})
    main_name = service.settings.model_names[0]
    for adapter in service.engine.info.adapters:
        if adapter.name == (service.adapter or name):
            meta = AdapterMeta(
                rank=adapter.rank, targets=list(adapter.targets), digest=adapter.digest, bytes=adapter.bytes
            )
            entry = _model_entry(service, name, main_name, service.engine.info, {"adapter": meta})
            return {**entry, "parent": main_name}
    return _model_entry(service, name, main_name, service.engine.info, {})


def _entry_of_several(models: SeveralModels, name: str, files: Mapping[str, ModelDescription]) -> Model:
    """A model in any state; never loads it.

    files  descriptions by main name
    """
    entry = models.entry_of(name)
    if entry is None:
        raise models.unknown(name)
    status, engine = models.loader.status(entry.name), models.loader.engine(entry.name)
    described = Model(id=name, object="model", created=models.created, owned_by="cellar", root=entry.name)
    if engine is not None and engine.ready:
        described = _model(models.service(entry, name, engine), name)
    description = files.get(entry.name)
    if description is not None:
        described = _with_description(described, description)
    state = ModelState(value=STATE_NAMES[status.state])
    if status.phase:
        state["progress"] = status.phase
    if status.reason:
        state["reason"] = status.reason
    return {**described, "status": state}


def _with_description(model: Model, description: ModelDescription) -> Model:
    """The model with what its files say; what the loaded model says comes first."""
    if description.context is not None:
        trained = OptionalMeta(n_ctx_train=description.context)
        model = {**model, "meta": {**model["meta"], **trained} if "meta" in model else trained}
    modalities = model.get("input_modalities", list(description.input_modalities))
    return {**model, "kind": description.kind, "input_modalities": modalities}


def _model_entry(service: Service, name: str, root: str, info: ModelInfo, more: OptionalMeta) -> Model:
    return Model(
        id=name,
        object="model",
        created=service.created,
        owned_by="cellar",
        root=root,
        max_model_len=info.context,
        input_modalities=list(info.input_modalities),
        meta={
            "n_params": info.parameters,
            "n_vocab": info.vocabulary,
            "n_ctx": info.context,
            "n_slots": info.slots,
            "architecture": info.architecture,
            "dtype": info.dtype,
            **more,
        },
    )
