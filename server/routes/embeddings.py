"""POST /v1/embeddings."""

from __future__ import annotations

import uuid

from fastapi import FastAPI, Request
from starlette.responses import Response

from server.generation.answer import cancel_on_disconnect
from server.http.encoding import large_json_response
from server.openai.embeddings import embeddings
from server.routes.openapi import ERROR_RESPONSES
from server.schemas.embeddings import EmbeddingList, EmbeddingRequest
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    """Add the route."""

    @app.post("/v1/embeddings", responses={**ERROR_RESPONSES, 200: {"model": EmbeddingList}})
    async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Turn texts into vectors."""

        async def work() -> Response:
            return await large_json_response(await embeddings(service, body, f"embd-{uuid.uuid4().hex}"))

        return await cancel_on_disconnect(request, work())
