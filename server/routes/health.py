"""GET /health: does the process live. GET /ready: does it take requests. Both open to all."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from server.http.encoding import JsonResponse
from server.routes.openapi import ERROR_RESPONSES
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    # Probes such as `wget --spider` ask for the head only.
    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses=ERROR_RESPONSES)
    async def health() -> Response:
        """200 while the engine thread lives, also when it loads or drains: a restart would not help then.

        `models` are the names of those that are loaded.
        """
        service.check_alive()
        return JsonResponse({"status": "ok", "phase": service.engine.phase, "models": list(service.loaded_names)})

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses=ERROR_RESPONSES)
    async def ready() -> Response:
        """200 while requests are taken; else 503 with the reason."""
        service.check_ready()
        return JsonResponse({"status": "ready"})
