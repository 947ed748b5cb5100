"""POST /v1/completions."""

from __future__ import annotations

import uuid

from fastapi import FastAPI, Request
from starlette.responses import Response

from server.generation.answering import answer
from server.http.lenient import warnings
from server.openai.completions import CompletionAnswer
from server.openai.continuation import continuation
from server.routes.documented import RESPONSES, streamed
from server.schemas.completions import Completion, CompletionRequest
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    """Add the route."""

    @app.post("/v1/completions", responses={**RESPONSES, **streamed(Completion, Completion)})
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        work = await continuation(service, body, f"cmpl-{uuid.uuid4().hex}")
        shape = CompletionAnswer(work, (*warnings(request), *work.warnings))
        return await answer(request, service, work.requests, shape, "completions")
