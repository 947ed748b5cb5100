"""POST /v1/decisions."""

from __future__ import annotations

import uuid

from fastapi import FastAPI, Request
from starlette.responses import Response

from server.generation.answering import unless_gone
from server.http.encoding import Json
from server.routes.documented import RESPONSES
from server.schemas.decisions import Decision, DecisionRequest
from server.scoring.decisions import decide
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    """Add the route."""

    @app.post("/v1/decisions", responses={**RESPONSES, 200: {"model": Decision}})
    async def create_decision(body: DecisionRequest, request: Request) -> Response:
        """Answer questions about an input."""

        async def work() -> Response:
            return Json(await decide(service, body, f"dec-{uuid.uuid4().hex}"))

        return await unless_gone(request, work())
