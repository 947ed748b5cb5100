"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from server.encoding import Json
from server.routes.documented import RESPONSES
from server.schemas.models import Model, ModelList
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.get("/v1/models", responses={**RESPONSES, 200: {"model": ModelList}})
    async def list_models() -> Response:
        """List the names that the model answers to."""
        models = [_model(service, name) for name in service.settings.names]
        return Json(ModelList(object="list", data=models))

    # Names from the hub hold a slash.
    @app.get("/v1/models/{model:path}", responses={**RESPONSES, 200: {"model": Model}})
    async def retrieve_model(model: str) -> Response:
        """Describe the model under one of its names."""
        return Json(_model(service, service.resolve(model)))


def _model(service: Service, name: str) -> Model:
    service.check_ready()
    info = service.engine.info
    return Model(
        id=name,
        object="model",
        created=service.created,
        owned_by="cellar",
        root=service.settings.names[0],
        max_model_len=info.context,
        meta={
            "n_params": info.parameters,
            "n_vocab": info.vocabulary,
            "n_ctx": info.context,
            "n_slots": info.slots,
            "architecture": info.architecture,
            "dtype": info.dtype,
        },
    )
