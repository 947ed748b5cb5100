"""POST /v1/completions."""

from __future__ import annotations

import uuid

from fastapi import FastAPI, Request
from starlette.responses import Response

from server.generation.answer import answer
from server.http.lenient import warnings
from server.openai.completions import CompletionAnswer
from server.openai.prepared_completion import prepare_completion
from server.routes.openapi import ERROR_RESPONSES, event_stream_responses
from server.schemas.completions import Completion, CompletionRequest
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    """Add the route."""

    @app.post("/v1/completions", responses={**ERROR_RESPONSES, **event_stream_responses(Completion, Completion)})
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        work = await prepare_completion(service, body, f"cmpl-{uuid.uuid4().hex}")
        shape = CompletionAnswer(work, (*warnings(request), *work.warnings))
        return await answer(request, service, work.requests, shape, "completions")
