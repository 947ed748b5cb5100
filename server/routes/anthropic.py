"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients call them."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from engine.errors import EngineError
from server.anthropic.answer import AnthropicAnswer
from server.anthropic.translation import breaks, chat_request, reworded
from server.generation.answering import unless_gone
from server.generation.generation import generate
from server.generation.turn import Turn, chat_turn
from server.http.encoding import Json
from server.http.errors import MESSAGES, ApiError
from server.http.parsing import off_loop
from server.http.sse import EventStream, named_frame
from server.routes.documented import streamed
from server.schemas.anthropic import CountRequest, MessagesRequest
from server.schemas.anthropic_answer import AnsweredMessage, AnthropicErrorBody, AnthropicEvent, TokenCount
from server.service import Service

RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": AnthropicErrorBody, "description": "The request cannot be served as it is, or not now."},
    "5XX": {"model": AnthropicErrorBody, "description": "The server cannot serve it now."},
}


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.post(MESSAGES, responses={**RESPONSES, **streamed(AnsweredMessage, AnthropicEvent)})
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation."""
        turn = await _turn(service, body, request)
        answer = AnthropicAnswer(turn, breaks(body))
        opening = generate(service, turn.requests, "anthropic")
        if body.stream:
            return EventStream(opening, answer.teller(), service.settings.caps, named_frame, b"")

        async def whole() -> Response:
            async with opening as events:
                return Json(await answer.whole(events))

        return await unless_gone(request, whole())

    @app.post(f"{MESSAGES}/count_tokens", responses={**RESPONSES, 200: {"model": TokenCount}})
    async def count_message_tokens(body: CountRequest, request: Request) -> Response:
        """Count the tokens of the prompt that a conversation makes."""
        turn = await _turn(service, body, request)
        return Json(TokenCount(input_tokens=len(turn.requests[0].prompt)))


async def _turn(service: Service, body: CountRequest, http: Request) -> Turn:
    try:
        chat = await off_loop(http, chat_request, body)
        # The field is required here, and clients ask for more than small models hold without meaning it.
        most = min(chat.max_tokens or 1, service.engine.info.context)
        return await chat_turn(service, chat.model_copy(update={"max_tokens": most}), f"msg_{uuid.uuid4().hex}")
    except (ApiError, EngineError) as error:
        raise reworded(error) from error
