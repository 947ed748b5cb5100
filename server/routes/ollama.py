"""Ollama's API under /api: chat, generate, embeddings, model information."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import anyio.to_thread
from fastapi import FastAPI, Request
from starlette.responses import Response

from engine.errors import EngineError
from engine.types.status import EmbeddingModelInfo as EmbeddingModel
from engine.types.status import ModelInfo
from server.generation.answer import cancel_on_disconnect
from server.generation.chat_turn import prepare_chat
from server.generation.error_fields import with_client_field_names
from server.generation.requests import generate
from server.http.encoding import JsonResponse, large_json_response
from server.http.errors import OLLAMA_PREFIX, ApiError, invalid_value, missing_parameter, unsupported_parameter
from server.http.parsing import run_by_size
from server.http.stream_encoder import NdjsonStream
from server.http.version import version
from server.ollama.translation import (
    OllamaAnswer,
    chat_body,
    embed_response,
    generate_body,
    now,
    with_ollama_field_names,
)
from server.openai.embeddings import EmbeddingOptions, check_dimensions, embed, embedding_model, vector
from server.routes.openapi import ndjson_responses
from server.schemas.chat import ChatRequest
from server.schemas.ollama import (
    GenerateRequest,
    OllamaChatRequest,
    OllamaEmbedding,
    OllamaEmbeddingRequest,
    OllamaEmbeddings,
    OllamaEmbedRequest,
    OllamaErrorBody,
    OllamaGenerationFields,
    OllamaLine,
    ShowRequest,
    Version,
)
from server.service import Service

OLLAMA_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": OllamaErrorBody, "description": "The request is invalid or cannot be served now."},
    "5XX": {"model": OllamaErrorBody, "description": "The server cannot serve it now."},
}

# Clients append a tag to every name; here a name has one model.
LATEST_TAG = ":latest"


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    _add_chats(app, service)
    _add_embeddings(app, service)
    _add_cards(app, service)


def _add_chats(app: FastAPI, service: Service) -> None:
    @app.post("/api/chat", responses={**OLLAMA_ERRORS, **ndjson_responses(OllamaLine)})
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        model = _checked_model(service, body)
        if not body.messages:
            return JsonResponse({**_load_response(model), "message": {"role": "assistant", "content": ""}})
        return await _answer(service, request, await run_by_size(request, chat_body, body, model), plain=False)

    @app.post("/api/generate", responses={**OLLAMA_ERRORS, **ndjson_responses(OllamaLine)})
    async def complete(body: GenerateRequest, request: Request) -> Response:
        """Answer a prompt."""
        model = _checked_model(service, body)
        if body.raw:
            raise invalid_value("raw", "prompts without the model's template go to /v1/completions")
        if not body.prompt:
            return JsonResponse({**_load_response(model), "response": ""})
        return await _answer(service, request, await run_by_size(request, generate_body, body, model), plain=True)


def _add_embeddings(app: FastAPI, service: Service) -> None:
    @app.post("/api/embed", responses={**OLLAMA_ERRORS, 200: {"model": OllamaEmbeddings}})
    async def embed_all(body: OllamaEmbedRequest, request: Request) -> Response:
        """Turn texts into vectors of length 1."""
        model, started = embedding_model(service, _without_tag(service, body.model)), time.monotonic()
        check_dimensions(service, body.dimensions)
        inputs = [body.input] if isinstance(body.input, str) else body.input
        options = EmbeddingOptions(max_tokens=0 if body.truncate is False else -1)

        async def work() -> Response:
            job = await embed(service, inputs, options, id=uuid.uuid4().hex, endpoint="ollama")
            return await large_json_response(
                await anyio.to_thread.run_sync(embed_response, model, job, body.dimensions, started)
            )

        return await cancel_on_disconnect(request, work())

    @app.post("/api/embeddings", responses={**OLLAMA_ERRORS, 200: {"model": OllamaEmbedding}})
    async def embed_one(body: OllamaEmbeddingRequest, request: Request) -> Response:
        """Turn one text into a vector (the older endpoint)."""
        embedding_model(service, _without_tag(service, body.model))

        async def work() -> Response:
            try:
                job = await embed(
                    service, [body.prompt], EmbeddingOptions(max_tokens=-1), id=uuid.uuid4().hex, endpoint="ollama"
                )
            except (ApiError, EngineError) as error:
                raise with_client_field_names(error, OLLAMA_PREFIX, {"input": "prompt"}) from error
            return JsonResponse(OllamaEmbedding(embedding=list(vector(job.vectors[0]))))

        return await cancel_on_disconnect(request, work())


def _add_cards(app: FastAPI, service: Service) -> None:
    @app.get("/api/version", responses={**OLLAMA_ERRORS, 200: {"model": Version}})
    async def get_version() -> Response:
        """The version of this server."""
        return JsonResponse(Version(version=version()))

    @app.get("/api/tags", responses=OLLAMA_ERRORS)
    async def tags() -> Response:
        """List the names of the models."""
        service.check_ready()
        return JsonResponse({"models": [*_entries(service)]})

    @app.get("/api/ps", responses=OLLAMA_ERRORS)
    async def running() -> Response:
        """List the loaded models: all of them, at any time."""
        service.check_ready()
        memory, info = service.engine.memory, service.engine.info
        more = {
            "expires_at": "9999-12-31T23:59:59Z",
            "size_vram": 0 if info.device == "cpu" else memory.weights_bytes + memory.cache_bytes,
            "context_length": info.context,
        }
        return JsonResponse({"models": [{**more, **entry} for entry in _entries(service)]})

    @app.post("/api/show", responses=OLLAMA_ERRORS)
    async def show(body: ShowRequest) -> Response:
        """Describe a model."""
        name = body.model or body.name
        if name is None:
            raise missing_parameter("model")
        service.check_ready()
        embedding = service.engine.embedding
        if embedding is not None and _without_tag(service, name) == service.settings.embedding_name:
            return JsonResponse(_embedding_card(service, embedding))
        service.resolve(_without_tag(service, name))
        return JsonResponse(_model_card(service))


def _load_response(model: str) -> OllamaLine:
    """The response to a body without a prompt, a request to load the model."""
    return OllamaLine(model=model, created_at=now(), done=True, done_reason="load")


def _without_tag(service: Service, name: str) -> str:
    """The name without the default tag."""
    return name if name in service.settings.model_names else name.removesuffix(LATEST_TAG)


def _checked_model(service: Service, body: OllamaGenerationFields) -> str:
    """The name for the response; raises the errors of the model, the engine's state and the options."""
    model = service.resolve(_without_tag(service, body.model))
    service.check_ready()
    context, asked = service.engine.info.context, body.options and body.options.num_ctx
    if asked and asked > context:
        raise invalid_value("options.num_ctx", f"this server was started with a context of {context} tokens")
    if body.think and not service.engine.tokenizer.chat_format.supports_reasoning:
        raise unsupported_parameter("think", "it writes no reasoning")
    return model


async def _answer(service: Service, request: Request, body: ChatRequest, *, plain: bool) -> Response:
    try:
        turn = await prepare_chat(service, body, uuid.uuid4().hex)
    except (ApiError, EngineError) as error:
        raise with_ollama_field_names(error) from error
    answer = OllamaAnswer(turn, plain)
    opening = generate(service, turn.requests, "ollama")
    if body.stream:
        return NdjsonStream(opening, answer.encoder())

    async def whole() -> Response:
        async with opening as events:
            return JsonResponse(await answer.response(events))

    return await cancel_on_disconnect(request, whole())


def _entries(service: Service) -> Iterator[dict[str, Any]]:
    """Every model under each of its names, with its memory."""
    info, embedding = service.engine.info, service.engine.embedding
    for name in service.settings.model_names:
        yield {**_entry(service, name, info), "size": service.engine.memory.weights_bytes}
    if embedding is not None and service.settings.embedding_name is not None:
        size, model = embedding.weights_bytes, embedding.model
        more = {"size": size, "size_vram": 0 if model.device == "cpu" else size, "context_length": model.context}
        yield {**_entry(service, service.settings.embedding_name, model), **more}


def _entry(service: Service, name: str, info: ModelInfo) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": _modified(service),
        "digest": info.fingerprint,
        "details": _details(info),
    }


def _modified(service: Service) -> str:
    return datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")


def _details(info: ModelInfo) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": _parameter_size(info.parameters),
        "quantization_level": info.dtype,
    }


def _model_card(service: Service) -> dict[str, Any]:
    info, tokenizer = service.engine.info, service.engine.tokenizer
    chats = tokenizer.has_chat_template
    abilities = {
        "completion": True,
        "tools": chats and tokenizer.chat_format.supports_tool_calls,
        "thinking": chats and tokenizer.chat_format.supports_reasoning,
        "embedding": service.embedder is None,
    }
    return {
        "modelfile": "",
        "parameters": "",
        "template": tokenizer.template,
        "details": _details(info),
        "model_info": _model_info(info),
        "capabilities": [name for name, there in abilities.items() if there],
        "modified_at": _modified(service),
    }


def _embedding_card(service: Service, embedding: EmbeddingModel) -> dict[str, Any]:
    info = embedding.model
    length = {f"{info.architecture}.embedding_length": embedding.dimensions}
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _details(info),
        "model_info": {**_model_info(info), **length},
        "capabilities": ["embedding"] if embedding.output_kind == "vectors" else [],
        "modified_at": _modified(service),
    }


def _model_info(info: ModelInfo) -> dict[str, Any]:
    return {
        "general.architecture": info.architecture,
        "general.parameter_count": info.parameters,
        f"{info.architecture}.context_length": info.context,
        f"{info.architecture}.vocab_size": info.vocabulary,
    }


def _parameter_size(parameters: int) -> str:
    """A count in Ollama's format: 7.6B, 134.52M, 12.3K."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= size:
            return f"{parameters / size:.1f}{letter}" if letter == "B" else f"{parameters / size:.2f}{letter}"
    return str(parameters)
