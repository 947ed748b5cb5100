"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid

from fastapi import FastAPI, Request
from starlette.responses import Response

from server.generation.answering import answer
from server.generation.turn import chat_turn
from server.http.lenient import warnings
from server.openai.chat import ChatAnswer
from server.routes.documented import RESPONSES, streamed
from server.schemas.chat import ChatChunk, ChatCompletion, ChatRequest
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    """Add the route."""

    @app.post("/v1/chat/completions", responses={**RESPONSES, **streamed(ChatCompletion, ChatChunk)})
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        turn = await chat_turn(service, body, f"chatcmpl-{uuid.uuid4().hex}")
        shape = ChatAnswer(turn, (*warnings(request), *turn.warnings))
        return await answer(request, service, turn.requests, shape, "chat")
