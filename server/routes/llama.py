"""llama.cpp's own endpoints: POST /completion and /infill, GET /props and /slots."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from engine.types.snapshot import SlotSnapshot
from server.generation.answer import cancel_on_disconnect
from server.generation.requests import generate
from server.http.encoding import JsonResponse
from server.http.sse import EventStream
from server.http.version import version
from server.llama.answer import LlamaEncoder, response
from server.llama.translation import DEFAULTS, PreparedLlama, prepare_infill, prepare_llama_completion
from server.models.registry import ModelRegistry
from server.routes.openapi import ERROR_RESPONSES, EVENT_STREAM, streamed_responses
from server.schemas.llama import (
    InfillRequest,
    LlamaCompletion,
    LlamaCompletionRequest,
    LlamaProperties,
    LlamaSlot,
)
from server.service import Service

_ANSWERS = {**ERROR_RESPONSES, **streamed_responses(LlamaCompletion, EVENT_STREAM)}


def add(app: FastAPI, models: ModelRegistry) -> None:
    """Add the routes."""

    @app.post("/completion", responses=_ANSWERS)
    async def complete(body: LlamaCompletionRequest, request: Request) -> Response:
        """Continue one or more prompts, as llama.cpp's server does."""
        service = models.use(body.model)
        return await _answer(request, service, await prepare_llama_completion(service, body, _id()))

    @app.post("/infill", responses=_ANSWERS)
    async def fill(body: InfillRequest, request: Request) -> Response:
        """Fill the gap between two texts, as llama.cpp's server does for editors."""
        service = models.use(body.model)
        return await _answer(request, service, await prepare_infill(service, body, _id()))

    @app.get("/props", responses={**ERROR_RESPONSES, 200: {"model": LlamaProperties}})
    async def properties() -> Response:
        """The context, the chat template and the default settings, as llama.cpp's server lists them."""
        service = models.use()
        service.check_ready()
        return JsonResponse(_properties(service))

    @app.get("/slots", responses={**ERROR_RESPONSES, 200: {"model": list[LlamaSlot]}})
    async def slots() -> Response:
        """The slots, without texts; token counts are limited to the API key's sequences."""
        service = models.use()
        service.check_ready()
        snapshot = await service.snapshot()
        speculative = bool(service.engine.drafting.kinds)
        listed = [_slot(slot, snapshot.context, speculative=speculative) for slot in snapshot.slots]
        return JsonResponse(listed, headers={"Cache-Control": "no-store"})


async def _answer(request: Request, service: Service, prepared: PreparedLlama) -> Response:
    opening = generate(service, prepared.requests, "completions")
    if prepared.body.stream:
        return EventStream(opening, LlamaEncoder(prepared, prepared.warnings), service.settings.limits, end=b"")

    async def work() -> Response:
        async with opening as events:
            return JsonResponse(await response(prepared, events, prepared.warnings))

    return await cancel_on_disconnect(request, work())


def _id() -> str:
    return f"cmpl-{uuid.uuid4().hex}"


def _properties(service: Service) -> LlamaProperties:
    info, tokenizer = service.engine.info, service.engine.tokenizer
    settings: dict[str, Any] = {**DEFAULTS, "n_predict": -1}
    return LlamaProperties(
        default_generation_settings={**settings, "params": settings, "n_ctx": info.context},
        total_slots=info.slots,
        model_alias=service.name,
        model_path=service.name,
        modalities={"vision": False, "audio": False},
        chat_template=tokenizer.template,
        build_info=f"cellar {version()}",
    )


def _slot(slot: SlotSnapshot, context: int, *, speculative: bool) -> LlamaSlot:
    listed = LlamaSlot(id=slot.slot, n_ctx=context, speculative=speculative, is_processing=slot.state != "free")
    if slot.sequence is not None:
        listed["next_token"] = [{"n_decoded": slot.sequence.generated_tokens}]
    return listed
