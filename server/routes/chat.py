"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid

from fastapi import FastAPI, Request
from starlette.responses import Response

from server.generation.answer import answer
from server.generation.chat_turn import prepare_chat
from server.http.lenient import warnings
from server.openai.chat import ChatAnswer
from server.routes.openapi import ERROR_RESPONSES, event_stream_responses
from server.schemas.chat import ChatChunk, ChatCompletion, ChatRequest
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    """Add the route."""

    @app.post(
        "/v1/chat/completions", responses={**ERROR_RESPONSES, **event_stream_responses(ChatCompletion, ChatChunk)}
    )
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        turn = await prepare_chat(service, body, f"chatcmpl-{uuid.uuid4().hex}")
        shape = ChatAnswer(turn, (*warnings(request), *turn.warnings))
        return await answer(request, service, turn.requests, shape, "chat")
