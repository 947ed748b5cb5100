"""POST /rerank, /v1/rerank and /v2/rerank: documents in the order in which they answer a query."""

from __future__ import annotations

import uuid

from fastapi import FastAPI, Request
from starlette.responses import Response

from server.generation.answering import unless_gone
from server.http.encoding import Json
from server.routes.documented import RESPONSES
from server.schemas.scoring import Ranking, RerankRequest
from server.scoring.scoring import rerank
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.post("/v2/rerank", responses={**RESPONSES, 200: {"model": Ranking}})
    @app.post("/v1/rerank", responses={**RESPONSES, 200: {"model": Ranking}})
    @app.post("/rerank", responses={**RESPONSES, 200: {"model": Ranking}})
    async def create_ranking(body: RerankRequest, request: Request) -> Response:
        """Put documents in order."""

        async def work() -> Response:
            return Json(await rerank(service, body, f"rerank-{uuid.uuid4().hex}"))

        return await unless_gone(request, work())
