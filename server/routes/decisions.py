"""POST /v1/decisions."""

from __future__ import annotations

import uuid

from fastapi import FastAPI, Request
from starlette.responses import Response

from server.generation.answer import cancel_on_disconnect
from server.http.encoding import JsonResponse
from server.routes.openapi import ERROR_RESPONSES
from server.schemas.decisions import Decision, DecisionRequest
from server.scoring.decisions import decide
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    """Add the route."""

    @app.post("/v1/decisions", responses={**ERROR_RESPONSES, 200: {"model": Decision}})
    async def create_decision(body: DecisionRequest, request: Request) -> Response:
        """Answer questions about an input."""

        async def work() -> Response:
            return JsonResponse(await decide(service, body, f"dec-{uuid.uuid4().hex}"))

        return await cancel_on_disconnect(request, work())
