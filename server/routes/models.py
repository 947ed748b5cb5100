"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from engine.types.status import ModelInfo
from server.http.encoding import JsonResponse
from server.models.registry import ModelRegistry
from server.routes.openapi import ERROR_RESPONSES
from server.schemas.models import AdapterMeta, Model, ModelList, OptionalMeta
from server.service import Service


def add(app: FastAPI, models: ModelRegistry) -> None:
    """Add the routes."""

    @app.get("/v1/models", responses={**ERROR_RESPONSES, 200: {"model": ModelList}})
    async def list_models() -> Response:
        """List the names of the models."""
        service, names = models.use(), models.all_names
        return JsonResponse(ModelList(object="list", data=[_model(service, name) for name in names]))

    # Hub ids contain a slash.
    @app.get("/v1/models/{model:path}", responses={**ERROR_RESPONSES, 200: {"model": Model}})
    async def retrieve_model(model: str) -> Response:
        """Describe a model by one of its names."""
        model = models.served_name(model)
        service = models.use(None if model == models.settings.embedding_name else model)
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


def _model_entry(service: Service, name: str, root: str, info: ModelInfo, more: OptionalMeta) -> Model:
    return Model(
        id=name,
        object="model",
        created=service.created,
        owned_by="cellar",
        root=root,
        max_model_len=info.context,
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
