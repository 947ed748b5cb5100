"""vLLM's POST /v1/load_lora_adapter and /v1/unload_lora_adapter, and llama.cpp's /lora-adapters."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from server.http.auth import caller
from server.http.encoding import JsonResponse
from server.http.errors import UNSUPPORTED_PARAMETER, ApiError, invalid_value
from server.models.permission import ModelPermission
from server.models.presets import LATEST_TAG
from server.models.registry import ModelRegistry
from server.routes.openapi import ERROR_RESPONSES
from server.schemas.adapters import LlamaAdapter, LoadAdapterRequest, UnloadAdapterRequest

_TEXT = {**ERROR_RESPONSES, 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


def add(app: FastAPI, models: ModelRegistry) -> None:
    """Add the routes."""
    permission = ModelPermission(models.settings.has_keys)

    @app.post("/v1/load_lora_adapter", responses=_TEXT)
    async def load_adapter(body: LoadAdapterRequest, request: Request) -> Response:
        """Load an adapter below the folder of `--lora-dir`."""
        permission.check(request)
        service, name = models.use(), body.lora_name
        service.check_ready()
        _check_name(models, name)
        await service.engine.load_adapter(name, body.lora_path, in_place=bool(body.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", responses=_TEXT)
    async def unload_adapter(body: UnloadAdapterRequest, request: Request) -> Response:
        """Unload an adapter; running requests keep it."""
        permission.check(request)
        service, name = models.use(), body.lora_name
        service.check_ready()
        service.engine.unload_adapter(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    @app.get("/lora-adapters", responses={**ERROR_RESPONSES, 200: {"model": list[LlamaAdapter]}})
    async def list_adapters() -> Response:
        """List the loaded adapters, as llama.cpp's server does."""
        service = models.use()
        service.check_ready()
        adapters = service.engine.info.adapters
        listed = [
            LlamaAdapter(id=id, path=adapter.name, scale=0.0)
            for id, adapter in enumerate(adapters)
            if caller().may_use(adapter.name)
        ]
        return JsonResponse(listed)

    @app.post("/lora-adapters", responses=ERROR_RESPONSES)
    async def set_scales() -> Response:
        """Refused: an adapter applies to the requests that name it."""
        message = "This server has no scale of an adapter for all requests: name the adapter as the model of a request."
        raise ApiError(UNSUPPORTED_PARAMETER, message, param="scale")


def _check_name(models: ModelRegistry, name: str) -> None:
    """Raise ApiError for a name that requests cannot use for an adapter."""
    if not name.isprintable() or name != name.strip():
        raise invalid_value("lora_name", "it has spaces at an end, or control characters")
    settings = models.settings
    if name.removesuffix(LATEST_TAG) in (*settings.model_names, settings.embedding_name):
        raise invalid_value("lora_name", "a served model has this name")
