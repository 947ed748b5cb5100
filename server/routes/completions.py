"""POST /v1/chat/completions, /v1/completions and /v1/embeddings."""

from __future__ import annotations

import uuid

from fastapi import FastAPI, Request
from starlette.responses import Response

from server.generation.answer import answer, cancel_on_disconnect
from server.generation.chat_turn import prepare_chat
from server.http.encoding import large_json_response
from server.http.lenient import warnings
from server.models.registry import ModelRegistry
from server.openai.chat import ChatAnswer
from server.openai.completions import CompletionAnswer
from server.openai.embeddings import embeddings
from server.openai.prepared_completion import prepare_completion
from server.routes.openapi import ERROR_RESPONSES, EVENT_STREAM, streamed_responses
from server.schemas.chat import ChatCompletion, ChatRequest
from server.schemas.completions import Completion, CompletionRequest
from server.schemas.embeddings import EmbeddingList, EmbeddingRequest


def add(app: FastAPI, models: ModelRegistry) -> None:
    """Add the routes."""

    @app.post("/v1/chat/completions", responses={**ERROR_RESPONSES, **streamed_responses(ChatCompletion, EVENT_STREAM)})
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        service = models.use(body.model)
        turn = await prepare_chat(service, body, f"chatcmpl-{uuid.uuid4().hex}")
        shape = ChatAnswer(turn, (*warnings(request), *turn.warnings))
        return await answer(request, service, turn.requests, shape, "chat")

    @app.post("/v1/completions", responses={**ERROR_RESPONSES, **streamed_responses(Completion, EVENT_STREAM)})
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        service = models.use(body.model)
        work = await prepare_completion(service, body, f"cmpl-{uuid.uuid4().hex}")
        shape = CompletionAnswer(work, (*warnings(request), *work.warnings))
        return await answer(request, service, work.requests, shape, "completions")

    @app.post("/v1/embeddings", responses={**ERROR_RESPONSES, 200: {"model": EmbeddingList}})
    async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Turn texts into vectors."""

        async def work() -> Response:
            return await large_json_response(await embeddings(models, body, f"embd-{uuid.uuid4().hex}"))

        return await cancel_on_disconnect(request, work())
