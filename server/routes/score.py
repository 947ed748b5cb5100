"""POST /score and /v1/score: the relevance of the second text of each pair for the first."""

from __future__ import annotations

import uuid

from fastapi import FastAPI, Request
from starlette.responses import Response

from server.generation.answer import cancel_on_disconnect
from server.http.encoding import JsonResponse
from server.routes.openapi import ERROR_RESPONSES
from server.schemas.scoring import ScoreList, ScoreRequest
from server.scoring.scoring import score
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.post("/v1/score", responses={**ERROR_RESPONSES, 200: {"model": ScoreList}})
    @app.post("/score", responses={**ERROR_RESPONSES, 200: {"model": ScoreList}})
    async def create_scores(body: ScoreRequest, request: Request) -> Response:
        """Score pairs of texts."""

        async def work() -> Response:
            return JsonResponse(await score(service, body, f"score-{uuid.uuid4().hex}"))

        return await cancel_on_disconnect(request, work())
