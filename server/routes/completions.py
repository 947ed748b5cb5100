"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid

from fastapi import FastAPI, Request
from starlette.responses import Response

from server.answering import answer
from server.completions import CompletionAnswer, completion_requests
from server.routes.documented import RESPONSES, streamed
from server.schemas.completions import Completion, CompletionRequest
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    """Add the route."""

    @app.post("/v1/completions", responses={**RESPONSES, **streamed(Completion, Completion)})
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        model = service.resolve(body.model)
        service.check_ready()
        id = f"cmpl-{uuid.uuid4().hex}"
        requests = await completion_requests(service, body, id)
        shape = CompletionAnswer(id, int(time.time()), model, service.fingerprint(), body)
        return await answer(request, service, requests, shape, "completions")
