"""Ollama's own API under /api: chat, generate, embeddings, and what there is to know of the model."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import anyio.to_thread
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from engine.errors import EngineError
from engine.types.status import Embedding as EmbeddingModel
from engine.types.status import ModelInfo
from server.generation.answering import unless_gone
from server.generation.generation import generate
from server.generation.renaming import renamed
from server.generation.turn import chat_turn
from server.http.encoding import Json, large_json
from server.http.errors import OLLAMA, ApiError, invalid, missing, unsupported
from server.http.ndjson import LineStream
from server.http.parsing import off_loop
from server.http.version import version
from server.ollama.translation import OllamaAnswer, chat_body, embedded, generate_body, now, reworded
from server.openai.embeddings import Wish, answering, check_dimensions, embed, vector
from server.routes.documented import lined
from server.schemas.chat import ChatRequest
from server.schemas.ollama import (
    Asking,
    Embedding,
    EmbeddingRequest,
    Embeddings,
    EmbedRequest,
    GenerateRequest,
    Line,
    OllamaChatRequest,
    OllamaErrorBody,
    ShowRequest,
    Version,
)
from server.service import Service

RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": OllamaErrorBody, "description": "The request cannot be served as it is, or not now."},
    "5XX": {"model": OllamaErrorBody, "description": "The server cannot serve it now."},
}

# Clients write a tag behind every name; here a name has one model.
_TAG = ":latest"


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    _add_chats(app, service)
    _add_embeddings(app, service)
    _add_cards(app, service)


def _add_chats(app: FastAPI, service: Service) -> None:
    @app.post("/api/chat", responses={**RESPONSES, **lined(Line)})
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        model = _ready(service, body)
        if not body.messages:
            return Json({**_loaded(model), "message": {"role": "assistant", "content": ""}})
        return await _answer(service, request, await off_loop(request, chat_body, body, model), plain=False)

    @app.post("/api/generate", responses={**RESPONSES, **lined(Line)})
    async def complete(body: GenerateRequest, request: Request) -> Response:
        """Answer a prompt."""
        model = _ready(service, body)
        if body.raw:
            raise invalid("raw", "prompts without the model's template go to /v1/completions")
        if not body.prompt:
            return Json({**_loaded(model), "response": ""})
        return await _answer(service, request, await off_loop(request, generate_body, body, model), plain=True)


def _add_embeddings(app: FastAPI, service: Service) -> None:
    @app.post("/api/embed", responses={**RESPONSES, 200: {"model": Embeddings}})
    async def embed_all(body: EmbedRequest, request: Request) -> Response:
        """Turn texts into vectors of length 1."""
        model, begun = answering(service, _name(service, body.model)), time.monotonic()
        check_dimensions(service, body.dimensions)
        inputs = [body.input] if isinstance(body.input, str) else body.input
        wish = Wish(most=0 if body.truncate is False else -1)

        async def work() -> Response:
            made = await embed(service, inputs, wish, id=uuid.uuid4().hex, endpoint="ollama")
            return await large_json(await anyio.to_thread.run_sync(embedded, model, made, body.dimensions, begun))

        return await unless_gone(request, work())

    @app.post("/api/embeddings", responses={**RESPONSES, 200: {"model": Embedding}})
    async def embed_one(body: EmbeddingRequest, request: Request) -> Response:
        """Turn one text into a vector, as older clients ask for it."""
        answering(service, _name(service, body.model))

        async def work() -> Response:
            try:
                made = await embed(service, [body.prompt], Wish(most=-1), id=uuid.uuid4().hex, endpoint="ollama")
            except (ApiError, EngineError) as error:
                raise renamed(error, OLLAMA, {"input": "prompt"}) from error
            return Json(Embedding(embedding=list(vector(made.vectors[0]))))

        return await unless_gone(request, work())


def _add_cards(app: FastAPI, service: Service) -> None:
    # Ollama's own command looks here first.
    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def greet() -> Response:
        """That a server is here."""
        return PlainTextResponse("Cellar is running")

    @app.get("/api/version", responses={**RESPONSES, 200: {"model": Version}})
    async def tell_version() -> Response:
        """The version of this server."""
        return Json(Version(version=version()))

    @app.get("/api/tags", responses=RESPONSES)
    async def tags() -> Response:
        """The names that the model answers to."""
        service.check_ready()
        return Json({"models": [*_entries(service)]})

    @app.get("/api/ps", responses=RESPONSES)
    async def running() -> Response:
        """The same names: the models are loaded as long as the server runs."""
        service.check_ready()
        memory, info = service.engine.memory, service.engine.info
        more = {
            "expires_at": "9999-12-31T23:59:59Z",
            "size_vram": 0 if info.device == "cpu" else memory.weights_bytes + memory.cache_bytes,
            "context_length": info.context,
        }
        return Json({"models": [{**more, **entry} for entry in _entries(service)]})

    @app.post("/api/show", responses=RESPONSES)
    async def show(body: ShowRequest) -> Response:
        """What there is to know of the model."""
        name = body.model or body.name
        if name is None:
            raise missing("model")
        service.check_ready()
        embedding = service.engine.embedding
        if embedding is not None and _name(service, name) == service.settings.embedding_name:
            return Json(_embedding_card(service, embedding))
        service.resolve(_name(service, name))
        return Json(_card(service))


def _loaded(model: str) -> Line:
    """The answer to a body without a prompt, which asks for the model to be loaded: it always is."""
    return Line(model=model, created_at=now(), done=True, done_reason="load")


def _name(service: Service, name: str) -> str:
    """The name without the tag that is not part of it."""
    return name if name in service.settings.names else name.removesuffix(_TAG)


def _ready(service: Service, body: Asking) -> str:
    """The name to answer under; raises what is wrong with the model that was asked for."""
    model = service.resolve(_name(service, body.model))
    service.check_ready()
    context, asked = service.engine.info.context, body.options and body.options.num_ctx
    if asked and asked > context:
        raise invalid("options.num_ctx", f"this server was started with a context of {context} tokens")
    if body.think and not service.engine.tokenizer.dialect.reasons:
        raise unsupported("think", "it writes no reasoning")
    return model


async def _answer(service: Service, request: Request, body: ChatRequest, *, plain: bool) -> Response:
    try:
        turn = await chat_turn(service, body, uuid.uuid4().hex)
    except (ApiError, EngineError) as error:
        raise reworded(error) from error
    answer = OllamaAnswer(turn, plain)
    opening = generate(service, turn.requests, "ollama")
    if body.stream:
        return LineStream(opening, answer.teller())

    async def whole() -> Response:
        async with opening as events:
            return Json(await answer.whole(events))

    return await unless_gone(request, whole())


def _entries(service: Service) -> Iterator[dict[str, Any]]:
    """Every model under each of its names; of the embedding model also what /api/ps tells."""
    info, embedding = service.engine.info, service.engine.embedding
    for name in service.settings.names:
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
        "parameter_size": _short(info.parameters),
        "quantization_level": info.dtype,
    }


def _card(service: Service) -> dict[str, Any]:
    info, tokenizer = service.engine.info, service.engine.tokenizer
    chats = tokenizer.has_chat_template
    abilities = {
        "completion": True,
        "tools": chats and tokenizer.dialect.calls,
        "thinking": chats and tokenizer.dialect.reasons,
        "embedding": service.vectors is None,
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
        "capabilities": ["embedding"] if embedding.makes == "vectors" else [],
        "modified_at": _modified(service),
    }


def _model_info(info: ModelInfo) -> dict[str, Any]:
    return {
        "general.architecture": info.architecture,
        "general.parameter_count": info.parameters,
        f"{info.architecture}.context_length": info.context,
        f"{info.architecture}.vocab_size": info.vocabulary,
    }


def _short(parameters: int) -> str:
    """A count as Ollama writes it: 7.6B, 134.52M, 12.3K."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= size:
            return f"{parameters / size:.1f}{letter}" if letter == "B" else f"{parameters / size:.2f}{letter}"
    return str(parameters)
