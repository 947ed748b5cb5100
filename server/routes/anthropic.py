"""POST /v1/messages and /v1/messages/count_tokens (Anthropic's API)."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from engine.errors import EngineError
from server.anthropic.answer import AnthropicAnswer
from server.anthropic.translation import chat_request, has_cache_control, with_anthropic_field_names
from server.generation.answer import cancel_on_disconnect
from server.generation.chat_turn import ChatTurn, prepare_chat
from server.generation.requests import generate
from server.http.encoding import JsonResponse
from server.http.errors import ANTHROPIC_PREFIX, ApiError
from server.http.parsing import run_by_size
from server.http.sse import EventStream, named_frame
from server.models.registry import ModelRegistry
from server.routes.openapi import EVENT_STREAM, streamed_responses
from server.schemas.anthropic import CountRequest, MessagesRequest
from server.schemas.anthropic_answer import AnsweredMessage, AnthropicErrorBody, TokenCount

ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": AnthropicErrorBody, "description": "The request is invalid or cannot be served now."},
    "5XX": {"model": AnthropicErrorBody, "description": "The server cannot serve it now."},
}


def add(app: FastAPI, models: ModelRegistry) -> None:
    """Add the routes."""

    @app.post(ANTHROPIC_PREFIX, responses={**ANTHROPIC_ERRORS, **streamed_responses(AnsweredMessage, EVENT_STREAM)})
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation."""
        turn = await _turn(models, body, request)
        service = models.use(turn.model)
        answer = AnthropicAnswer(turn, has_cache_control(body))
        opening = generate(service, turn.requests, "anthropic")
        if body.stream:
            return EventStream(opening, answer.encoder(), service.settings.limits, named_frame, b"")

        async def whole() -> Response:
            async with opening as events:
                return JsonResponse(await answer.response(events))

        return await cancel_on_disconnect(request, whole())

    @app.post(f"{ANTHROPIC_PREFIX}/count_tokens", responses={**ANTHROPIC_ERRORS, 200: {"model": TokenCount}})
    async def count_message_tokens(body: CountRequest, request: Request) -> Response:
        """Count the tokens of a conversation's prompt."""
        turn = await _turn(models, body, request)
        return JsonResponse(TokenCount(input_tokens=len(turn.requests[0].prompt)))


async def _turn(models: ModelRegistry, body: CountRequest, http: Request) -> ChatTurn:
    try:
        chat = await run_by_size(http, chat_request, body)
        service = models.use(chat.model)
        # The field is required, and clients set it to more than the context of a small model.
        max_tokens = min(chat.max_tokens or 1, service.engine.info.context)
        return await prepare_chat(
            service, chat.model_copy(update={"max_tokens": max_tokens}), f"msg_{uuid.uuid4().hex}"
        )
    except (ApiError, EngineError) as error:
        raise with_anthropic_field_names(error) from error
