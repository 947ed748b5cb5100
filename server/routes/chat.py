"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid

from fastapi import FastAPI, Request
from starlette.responses import Response

from server.answering import answer
from server.chat import ChatAnswer, chat_request
from server.routes.documented import RESPONSES, streamed
from server.schemas.chat import ChatChunk, ChatCompletion, ChatRequest
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    """Add the route."""

    @app.post("/v1/chat/completions", responses={**RESPONSES, **streamed(ChatCompletion, ChatChunk)})
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        model = service.resolve(body.model)
        service.check_ready()
        id = f"chatcmpl-{uuid.uuid4().hex}"
        requests = [await chat_request(service, body, id)]
        shape = ChatAnswer(id, int(time.time()), model, service.fingerprint(), body)
        return await answer(request, service, requests, shape, "chat")
