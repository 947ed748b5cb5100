"""POST /v1/rerank, /v1/score and /v1/decisions."""

from __future__ import annotations

import uuid

from fastapi import FastAPI, Request
from starlette.responses import Response

from server.generation.answer import cancel_on_disconnect
from server.http.encoding import JsonResponse
from server.models.registry import ModelRegistry
from server.routes.openapi import ERROR_RESPONSES
from server.schemas.decisions import Decision, DecisionRequest
from server.schemas.scoring import AnyRerankRequest, RankedText, Ranking, RerankRequest, ScoreList, ScoreRequest
from server.scoring.decisions import decide
from server.scoring.scoring import rank, rerank, score


def add(app: FastAPI, models: ModelRegistry) -> None:
    """Add the routes."""

    @app.post("/v2/rerank", responses={**ERROR_RESPONSES, 200: {"model": Ranking}})
    @app.post("/v1/rerank", responses={**ERROR_RESPONSES, 200: {"model": Ranking}})
    async def create_ranking(body: RerankRequest, request: Request) -> Response:
        """Sort documents by relevance."""

        async def work() -> Response:
            return JsonResponse(await rerank(models, body, f"rerank-{uuid.uuid4().hex}"))

        return await cancel_on_disconnect(request, work())

    @app.post("/rerank", responses={**ERROR_RESPONSES, 200: {"model": Ranking | list[RankedText]}})
    async def create_ranking_or_list(body: AnyRerankRequest, request: Request) -> Response:
        """Sort documents by relevance; `texts` as TEI does."""

        async def work() -> Response:
            return JsonResponse(await rank(models, body, f"rerank-{uuid.uuid4().hex}"))

        return await cancel_on_disconnect(request, work())

    @app.post("/v1/score", responses={**ERROR_RESPONSES, 200: {"model": ScoreList}})
    @app.post("/score", responses={**ERROR_RESPONSES, 200: {"model": ScoreList}})
    async def create_scores(body: ScoreRequest, request: Request) -> Response:
        """Score pairs of texts."""

        async def work() -> Response:
            return JsonResponse(await score(models, body, f"score-{uuid.uuid4().hex}"))

        return await cancel_on_disconnect(request, work())

    @app.post("/v1/decisions", responses={**ERROR_RESPONSES, 200: {"model": Decision}})
    async def create_decision(body: DecisionRequest, request: Request) -> Response:
        """Answer questions about an input."""

        async def work() -> Response:
            return JsonResponse(await decide(models.use(body.model), body, f"dec-{uuid.uuid4().hex}"))

        return await cancel_on_disconnect(request, work())
