"""Ollama's API under /api: chat, generate, embeddings, model information."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any, Literal

import anyio.to_thread
from fastapi import FastAPI, Request
from starlette.responses import Response

from engine.errors import EngineError
from server.generation.answer import cancel_on_disconnect
from server.generation.chat_turn import ChatTurn, prepare_chat
from server.generation.error_fields import with_client_field_names
from server.generation.requests import generate
from server.http.admission import admitted
from server.http.auth import caller, owner
from server.http.encoding import JsonResponse, large_json_response
from server.http.errors import OLLAMA_PREFIX, ApiError, missing_parameter, unsupported_parameter
from server.http.lenient import warnings
from server.http.parsing import run_by_size
from server.http.stream_encoder import NdjsonStream
from server.http.version import version
from server.models.keep_alive import parse_keep_alive
from server.models.presets import Preset, chat_with_preset, generate_with_preset
from server.models.registry import ModelRegistry
from server.models.several import SeveralModels
from server.ollama.model_cards import ModelCards
from server.ollama.plain_turn import prepare_plain
from server.ollama.several_cards import all_cards, loaded_cards, unloaded_card
from server.ollama.translation import (
    OllamaAnswer,
    chat_body,
    client_warnings,
    embed_response,
    generate_body,
    with_ollama_field_names,
)
from server.openai.embeddings import EmbeddingOptions, check_dimensions, embed, vector
from server.routes import ollama_models
from server.routes.openapi import NDJSON, streamed_responses
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
    OllamaMessage,
    ShowRequest,
    Version,
    now,
)
from server.service import Service

OLLAMA_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": OllamaErrorBody, "description": "The request is invalid or cannot be served now."},
    "5XX": {"model": OllamaErrorBody, "description": "The server cannot serve it now."},
}

# The last version without image generation, which is refused; it has /v1/messages (0.14.0) and logprobs (0.12.11).
OLLAMA_VERSION = "0.14.2"

logger = logging.getLogger("cellar.http")


def add(app: FastAPI, models: ModelRegistry) -> None:
    """Add the routes."""
    _add_chats(app, models)
    _add_embeddings(app, models)
    _add_cards(app, models)
    _add_details(app, models)
    ollama_models.add(app, models, OLLAMA_ERRORS)


def _add_chats(app: FastAPI, models: ModelRegistry) -> None:
    @app.post("/api/chat", responses={**OLLAMA_ERRORS, **streamed_responses(OllamaLine, NDJSON)})
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        preset = models.presets.get(owner(request), body.model)
        if not body.messages and _is_unloaded(models, body, preset):
            return JsonResponse({**_load_response(body, [], "unload"), "message": {"role": "assistant", "content": ""}})
        service = _leased(models, body, preset)
        noted = [*warnings(request), *_warnings(service, body)]
        if not body.messages:
            answer = _load_response(body, [*noted, *_unload_warnings(body)])
            return JsonResponse({**answer, "message": {"role": "assistant", "content": ""}})
        if preset is not None:
            body = chat_with_preset(body, preset)
        with admitted(request):
            translated = await run_by_size(request, chat_body, body, service.name)
            turn = await _renamed(prepare_chat(service, translated, uuid.uuid4().hex))
        return await _answer(
            service, request, body, OllamaAnswer(turn, body.model, False, (*noted, *client_warnings(turn.warnings)))
        )

    @app.post("/api/generate", responses={**OLLAMA_ERRORS, **streamed_responses(OllamaLine, NDJSON)})
    async def complete(body: GenerateRequest, request: Request) -> Response:
        """Answer a prompt."""
        preset = models.presets.get(owner(request), body.model)
        if not body.prompt and not body.suffix and _is_unloaded(models, body, preset):
            return JsonResponse({**_load_response(body, [], "unload"), "response": ""})
        service = _leased(models, body, preset)
        _check_template(service, body)
        noted = [*warnings(request), *_warnings(service, body)]
        if not body.prompt and not body.suffix:
            answer = _load_response(body, [*noted, *_unload_warnings(body)])
            return JsonResponse({**answer, "response": ""})
        before: tuple[OllamaMessage, ...] = ()
        if preset is not None:
            body, before = generate_with_preset(body, preset), preset.messages
        with admitted(request):
            turn = await _renamed(_generate_turn(service, request, body, before))
        return await _answer(
            service, request, body, OllamaAnswer(turn, body.model, True, (*noted, *client_warnings(turn.warnings)))
        )


async def _generate_turn(
    service: Service, request: Request, body: GenerateRequest, before: Sequence[OllamaMessage]
) -> ChatTurn:
    if body.without_template:
        return await prepare_plain(service, body, service.name, uuid.uuid4().hex)
    translated = await run_by_size(request, generate_body, body, service.name, before)
    return await prepare_chat(service, translated, uuid.uuid4().hex)


def _add_embeddings(app: FastAPI, models: ModelRegistry) -> None:
    @app.post("/api/embed", responses={**OLLAMA_ERRORS, 200: {"model": OllamaEmbeddings}})
    async def embed_all(body: OllamaEmbedRequest, request: Request) -> Response:
        """Turn texts into vectors of length 1."""
        service, started = models.use_for_embeddings(models.without_tag(body.model)), time.monotonic()
        check_dimensions(service, body.dimensions)
        inputs = [body.input] if isinstance(body.input, str) else body.input
        if not inputs:
            return JsonResponse(
                OllamaEmbeddings(
                    model=service.name, embeddings=[], total_duration=0, load_duration=0, prompt_eval_count=0
                )
            )
        options = EmbeddingOptions(max_tokens=0 if body.truncate is False else -1)

        async def work() -> Response:
            job = await embed(service, inputs, options, id=uuid.uuid4().hex, endpoint="ollama")
            return await large_json_response(
                await anyio.to_thread.run_sync(embed_response, service.name, job, body.dimensions, started)
            )

        return await cancel_on_disconnect(request, work())

    @app.post("/api/embeddings", responses={**OLLAMA_ERRORS, 200: {"model": OllamaEmbedding}})
    async def embed_one(body: OllamaEmbeddingRequest, request: Request) -> Response:
        """Turn one text into a vector (the older endpoint)."""
        service = models.use_for_embeddings(models.without_tag(body.model))

        async def work() -> Response:
            try:
                job = await embed(
                    service, [body.prompt], EmbeddingOptions(max_tokens=-1), id=uuid.uuid4().hex, endpoint="ollama"
                )
            except (ApiError, EngineError) as error:
                raise with_client_field_names(error, OLLAMA_PREFIX, {"input": "prompt"}) from error
            return JsonResponse(OllamaEmbedding(embedding=list(vector(job.vectors[0]))))

        return await cancel_on_disconnect(request, work())


def _add_cards(app: FastAPI, models: ModelRegistry) -> None:
    @app.get("/api/version", responses={**OLLAMA_ERRORS, 200: {"model": Version}})
    async def get_version() -> Response:
        """The version of Ollama whose API this is, and the version of this server."""
        return JsonResponse(Version(version=OLLAMA_VERSION, cellar_version=version()))

    @app.get("/api/tags", responses=OLLAMA_ERRORS)
    async def tags(request: Request) -> Response:
        """List the names of the models."""
        if isinstance(models, SeveralModels):
            await models.rescan()
            cards = all_cards(models, models.presets.of(owner(request)), await models.describe())
            return JsonResponse({"models": [*cards]})
        return JsonResponse({"models": _permitted(models, request, _cards(models, request).listed())})

    @app.get("/api/ps", responses=OLLAMA_ERRORS)
    async def running(request: Request) -> Response:
        """List the loaded models."""
        if isinstance(models, SeveralModels):
            return JsonResponse({"models": [*loaded_cards(models)]})
        return JsonResponse({"models": _permitted(models, request, _cards(models, request).running())})


def _cards(models: ModelRegistry, request: Request) -> ModelCards:
    service = models.use()
    service.check_ready()
    return ModelCards(service, models.presets.of(owner(request)))


def _permitted(models: ModelRegistry, request: Request, cards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cards of models that the key of the request may use, and of presets of these."""
    presets = models.presets.of(owner(request)).items()
    names = {*models.all_names, *(name for name, preset in presets if caller().may_use(preset.base))}
    return [card for card in cards if card["name"] in names]


def _add_details(app: FastAPI, models: ModelRegistry) -> None:
    @app.post("/api/show", responses=OLLAMA_ERRORS)
    async def show(body: ShowRequest, request: Request) -> Response:
        """Describe a model."""
        if (name := body.named) is None:
            raise missing_parameter("model")
        preset = models.presets.get(owner(request), name)
        if isinstance(models, SeveralModels):
            return JsonResponse(await _shown_of_several(models, name, preset))
        card, embedding = _cards(models, request), models.use().engine.embedding
        if embedding is not None and models.embeds(models.without_tag(name)):
            return JsonResponse(card.shown_embedding(embedding))
        models.use(models.without_tag(name) if preset is None else preset.base)
        return JsonResponse(await anyio.to_thread.run_sync(card.shown, preset))


async def _shown_of_several(models: SeveralModels, name: str, preset: Preset | None) -> dict[str, Any]:
    """A model in any state; never loads it."""
    entry = await models.find(name if preset is None else preset.base)
    if entry is None:
        raise models.unknown(name)
    engine = models.loader.engine(entry.name)
    if engine is None or not engine.ready:
        return unloaded_card(models, entry, (await models.describe()).get(entry.name), preset)
    cards = ModelCards(models.service(entry, name, engine), {})
    if engine.embedding is not None and entry.kind == "embedding":
        return cards.shown_embedding(engine.embedding)
    return await anyio.to_thread.run_sync(cards.shown, preset)


def _load_response(
    body: OllamaGenerationFields, noted: list[str], reason: Literal["load", "unload"] = "load"
) -> OllamaLine:
    """The response to a body without a prompt, a request to load or unload the model."""
    line = OllamaLine(model=body.model, created_at=now(), done=True, done_reason=reason)
    if noted:
        line["warnings"] = noted
    return line


def _is_unloaded(models: ModelRegistry, body: OllamaGenerationFields, preset: Preset | None) -> bool:
    """Unload the model of a body without a prompt whose keep_alive is 0; whether it was one."""
    if not isinstance(models, SeveralModels) or body.keep_alive is None or parse_keep_alive(body.keep_alive) != 0:
        return False
    entry = models.entry_of(body.model if preset is None else preset.base)
    if entry is None:
        raise models.unknown(body.model)
    models.loader.unload(entry.name)
    return True


def _leased(models: ModelRegistry, body: OllamaGenerationFields, preset: Preset | None) -> Service:
    """The service of the model; raises the errors of the model, the engine's state and the options."""
    service = models.use(models.without_tag(body.model) if preset is None else preset.base)
    service.check_ready()
    if body.think and not service.engine.tokenizer.chat_format.supports_reasoning:
        raise unsupported_parameter("think", "it writes no reasoning")
    return service


def _check_template(service: Service, body: GenerateRequest) -> None:
    if body.template and body.template != service.engine.tokenizer.template:
        raise unsupported_parameter("template", "its own chat template is used; send 'raw' with a complete prompt")


def _warnings(service: Service, body: OllamaGenerationFields) -> Iterator[str]:
    context, requested = service.engine.info.context, body.options and body.options.num_ctx
    if requested and requested > context:
        logger.info("options.num_ctx %d of a request exceeds the context of %d tokens", requested, context)
        yield f"'options.num_ctx' is {requested}: this server was started with a context of {context} tokens."


def _unload_warnings(body: OllamaGenerationFields) -> Iterator[str]:
    if body.keep_alive in (0, "0", "0s", "0m", "0h"):
        yield "'keep_alive' has no effect: the model stays loaded until the server stops."


async def _renamed(preparing: Awaitable[ChatTurn]) -> ChatTurn:
    """The prepared turn; errors have Ollama's field names."""
    try:
        return await preparing
    except (ApiError, EngineError) as error:
        raise with_ollama_field_names(error) from error


async def _answer(service: Service, request: Request, body: OllamaGenerationFields, answer: OllamaAnswer) -> Response:
    opening = generate(service, answer.turn.requests, "ollama")
    if body.stream is not False:
        return NdjsonStream(opening, answer.encoder())

    async def whole() -> Response:
        async with opening as events:
            return JsonResponse(await answer.response(events))

    return await cancel_on_disconnect(request, whole())
