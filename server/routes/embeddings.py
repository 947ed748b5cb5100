"""POST /v1/embeddings."""

from __future__ import annotations

import uuid

from fastapi import FastAPI, Request
from starlette.responses import Response

from server.generation.answering import unless_gone
from server.http.encoding import large_json
from server.openai.embeddings import embeddings
from server.routes.documented import RESPONSES
from server.schemas.embeddings import EmbeddingList, EmbeddingRequest
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    """Add the route."""

    @app.post("/v1/embeddings", responses={**RESPONSES, 200: {"model": EmbeddingList}})
    async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Turn texts into vectors."""

        async def work() -> Response:
            return await large_json(await embeddings(service, body, f"embd-{uuid.uuid4().hex}"))

        return await unless_gone(request, work())
