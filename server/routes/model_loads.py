"""llama.cpp's POST /models/load and /models/unload, of a server with several models."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from server.http.encoding import JsonResponse
from server.models.entry import ModelEntry
from server.models.permission import ModelPermission
from server.models.registry import ModelRegistry
from server.models.several import SeveralModels
from server.routes.openapi import ERROR_RESPONSES
from server.schemas.models import ModelCommand


def add(app: FastAPI, models: ModelRegistry) -> None:
    """Add the routes, if there are several models."""
    if not isinstance(models, SeveralModels):
        return
    permission = ModelPermission(models.settings.has_keys)

    @app.post("/models/load", responses=ERROR_RESPONSES)
    async def load(body: ModelCommand, request: Request) -> Response:
        """Begin to load a model; GET /v1/models shows the progress."""
        permission.check(request)
        models.loader.request_load((await _entry(models, body.model)).name)
        return JsonResponse({"success": True})

    @app.post("/models/unload", responses=ERROR_RESPONSES)
    async def unload(body: ModelCommand, request: Request) -> Response:
        """Unload a model after its running requests; a pinned one stays."""
        permission.check(request)
        models.loader.unload((await _entry(models, body.model)).name)
        return JsonResponse({"success": True})


async def _entry(models: SeveralModels, name: str) -> ModelEntry:
    entry = await models.find(name)
    if entry is None:
        raise models.unknown(name)
    return entry
