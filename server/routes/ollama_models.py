"""Ollama's routes that change the models: pull, delete, create, copy; and those that are refused: push, blobs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import anyio.to_thread
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from server.generation.answer import cancel_on_disconnect
from server.http.auth import owner
from server.http.encoding import JsonResponse
from server.http.errors import (
    FILE_NOT_FOUND,
    MODEL_NOT_FOUND,
    UNSUPPORTED_PARAMETER,
    ApiError,
    invalid_value,
    missing_parameter,
    unsupported_parameter,
)
from server.http.stream_encoder import Frames, json_line
from server.models.permission import ModelPermission
from server.models.presets import LATEST_TAG, Preset
from server.models.registry import ModelRegistry
from server.ollama.cached import remove_cached
from server.ollama.pull import Downloads, Lines, hub_name, served_lines
from server.routes.openapi import NDJSON, streamed_responses
from server.schemas.ollama import CopyRequest, CreateRequest, DeleteRequest, OllamaStatus, PullRequest

OTHER_MODEL = (
    "A server has one model, chosen at its start: cellar serve FOLDER_OR_GGUF --served-model-name NAME; "
    "--quantize sets the format of its weights."
)


def add(app: FastAPI, models: ModelRegistry, errors: dict[int | str, dict[str, Any]]) -> None:
    """Add the routes."""
    settings = models.settings
    permission = ModelPermission(settings.has_keys)
    names = _Names(models)
    _add_downloads(app, names, permission, errors)
    _add_presets(app, names, permission, errors)
    _add_refusals(app, errors)


class _Names:
    """Served models and presets by the names of requests."""

    def __init__(self, models: ModelRegistry) -> None:
        self.models, self.presets = models, models.presets

    def is_served(self, name: str) -> bool:
        """Whether requests may use a name, with or without the default tag."""
        served = self.models.all_names
        return name in served or self.models.served_name(name.removesuffix(LATEST_TAG)) in served

    def needs_no_download(self, request: Request, name: str) -> bool:
        """Whether requests may use a name already: with --served-model-name '*', any name without an organisation."""
        any_name = self.models.settings.serves_any_name and "/" not in name
        return any_name or self.is_served(name) or self.presets.get(owner(request), name) is not None

    def preset_of(self, request: Request, name: str, field: str) -> Preset:
        """The preset of a name, or a new one of a served model; ApiError for others."""
        preset = self.presets.get(owner(request), name)
        if preset is not None:
            return preset
        short = self.models.without_tag(name)
        if short not in self.models.names:
            if field == "from" and (base := self.models.name_of_folder(name)) is not None:
                return Preset(base, name)
            if "/" in name:
                message = f"This server has another model than '{name[:128]}'. {OTHER_MODEL}"
                raise ApiError(MODEL_NOT_FOUND, message, param=field)
            self.models.use(short)
        return Preset(short, name)

    def check_new(self, name: str, field: str) -> None:
        """Raise ApiError for a name that a served model has."""
        if self.is_served(name):
            raise invalid_value(field, "a served model has this name")


def _add_downloads(
    app: FastAPI, names: _Names, permission: ModelPermission, errors: dict[int | str, dict[str, Any]]
) -> None:
    downloads = Downloads()

    @app.post("/api/pull", responses={**errors, **streamed_responses(OllamaStatus, NDJSON)})
    async def pull(body: PullRequest, request: Request) -> Response:
        """Download a model of the hub into its cache. It is served after a restart."""
        permission.check(request)
        name = _required(body.named)
        if names.needs_no_download(request, name):
            return await _status_response(request, served_lines(name), body.stream)
        model = hub_name(name)
        downloads.check_capacity()
        return await _status_response(request, downloads.lines(model), body.stream)

    @app.delete("/api/delete", responses=errors)
    async def delete(body: DeleteRequest, request: Request) -> Response:
        """Delete a created model, or a model of the hub's cache."""
        permission.check(request)
        name = _required(body.named)
        if names.presets.remove(owner(request), name):
            return Response()
        names.models.check_ready()
        if names.is_served(name):
            raise invalid_value("model", "this server uses it; stop the server first")
        await anyio.to_thread.run_sync(remove_cached, names.models.loaded_engines, name)
        return Response()


def _add_presets(
    app: FastAPI, names: _Names, permission: ModelPermission, errors: dict[int | str, dict[str, Any]]
) -> None:
    @app.post("/api/create", responses={**errors, **streamed_responses(OllamaStatus, NDJSON)})
    async def create(body: CreateRequest, request: Request) -> Response:
        """Give the served model another name, with a system prompt, parameters and first messages."""
        permission.check(request)
        names.models.check_ready()
        name = _required(body.named)
        _check_files(body)
        names.check_new(name, "model")
        if body.from_ is None:
            raise missing_parameter("from")
        parent = names.preset_of(request, body.from_, "from")
        if body.template:
            await _check_template(names.models, parent, body.template)
        names.presets.set(owner(request), name, parent.derived(body))
        steps = ("reading model metadata", f"{name} is kept until the server stops", "success")
        return await _status_response(request, _constant_lines(steps), body.stream)

    @app.post("/api/copy", responses=errors)
    async def copy(body: CopyRequest, request: Request) -> Response:
        """Give a served or created model another name."""
        permission.check(request)
        names.models.check_ready()
        names.check_new(body.destination, "destination")
        preset = names.preset_of(request, body.source, "source")
        names.presets.set(owner(request), body.destination, preset.renewed())
        return Response()


def _add_refusals(app: FastAPI, errors: dict[int | str, dict[str, Any]]) -> None:
    @app.post("/api/push", responses=errors)
    async def push() -> Response:
        """Refused: no model is uploaded."""
        raise ApiError(UNSUPPORTED_PARAMETER, "This server uploads no models to a library.")

    @app.head("/api/blobs/{digest}", responses=errors)
    async def find_blob(digest: str) -> Response:
        """There are no blobs."""
        raise ApiError(FILE_NOT_FOUND, "This server keeps no blobs.")

    @app.post("/api/blobs/{digest}", responses=errors)
    async def create_blob(digest: str) -> Response:
        """Refused: another model needs a restart."""
        message = "This server accepts no model files. Put them into a folder and restart it: cellar serve FOLDER"
        raise ApiError(UNSUPPORTED_PARAMETER, message)


async def _check_template(models: ModelRegistry, parent: Preset, template: str) -> None:
    async with models.loaded(parent.base):
        if template != models.use(parent.base).engine.tokenizer.template:
            raise unsupported_parameter("template", "its own chat template is used")


def _check_files(body: CreateRequest) -> None:
    for field in ("files", "adapters", "modelfile", "path", "quantize", "quantization"):
        if getattr(body, field):
            raise ApiError(UNSUPPORTED_PARAMETER, f"This server does not support '{field}'. {OTHER_MODEL}", param=field)


def _required(name: str | None) -> str:
    if name is None:
        raise missing_parameter("model")
    return name


async def _constant_lines(steps: Sequence[str]) -> Lines:
    for step in steps:
        yield OllamaStatus(status=step)


async def _status_response(request: Request, lines: Lines, stream: bool | None) -> Response:
    """The lines as a stream, which an error ends; or the last one, or the error with its status."""
    if stream is not False:
        return StreamingResponse(_encoded(lines), media_type="application/x-ndjson")

    async def work() -> Response:
        async with aclosing(lines):
            [*_, last] = [line async for line in lines]
        return JsonResponse(last)

    return await cancel_on_disconnect(request, work())


async def _encoded(lines: Lines) -> Frames:
    async with aclosing(lines):
        try:
            async for line in lines:
                yield json_line(line)
        except ApiError as error:
            yield json_line(OllamaStatus(error=error.message))
