"""GET /metrics: Prometheus text."""

from __future__ import annotations

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from server.routes.openapi import ERROR_RESPONSES
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    """Add the route."""

    text = {"text/plain": {"schema": {"type": "string"}}}

    @app.get("/metrics", responses={**ERROR_RESPONSES, 200: {"content": text}}, response_class=Response)
    async def metrics() -> Response:
        """All metrics of this server."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)
