"""POST /rerank, /v1/rerank and /v2/rerank: documents in the order of their relevance for a query."""

from __future__ import annotations

import uuid

from fastapi import FastAPI, Request
from starlette.responses import Response

from server.generation.answer import cancel_on_disconnect
from server.http.encoding import JsonResponse
from server.routes.openapi import ERROR_RESPONSES
from server.schemas.scoring import Ranking, RerankRequest
from server.scoring.scoring import rerank
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.post("/v2/rerank", responses={**ERROR_RESPONSES, 200: {"model": Ranking}})
    @app.post("/v1/rerank", responses={**ERROR_RESPONSES, 200: {"model": Ranking}})
    @app.post("/rerank", responses={**ERROR_RESPONSES, 200: {"model": Ranking}})
    async def create_ranking(body: RerankRequest, request: Request) -> Response:
        """Sort documents by relevance."""

        async def work() -> Response:
            return JsonResponse(await rerank(service, body, f"rerank-{uuid.uuid4().hex}"))

        return await cancel_on_disconnect(request, work())
