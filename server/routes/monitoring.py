"""GET /health, /ready and /metrics. The first two need no key."""

from __future__ import annotations

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from server.http.auth import caller
from server.http.encoding import JsonResponse
from server.metrics.key_usage import KeyUsage
from server.metrics.loop_watchdog import LoopWatchdog
from server.models.registry import ModelRegistry
from server.routes.openapi import ERROR_RESPONSES


def add(app: FastAPI, models: ModelRegistry) -> None:
    """Add the routes."""

    # Probes such as `wget --spider` send HEAD.
    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses=ERROR_RESPONSES)
    async def health() -> Response:
        """200 while the engine thread is alive, also during loading and draining, when a restart would not help.

        `models` lists the names of the loaded models.
        """
        models.check_alive()
        return JsonResponse({"status": "ok", "phase": models.phase, "models": list(models.loaded_names)})

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses=ERROR_RESPONSES)
    async def ready() -> Response:
        """200 while requests are accepted, or 503 with the reason."""
        models.check_ready()
        return JsonResponse({"status": "ready"})

    text = {"text/plain": {"schema": {"type": "string"}}}

    @app.get("/metrics", responses={**ERROR_RESPONSES, 200: {"content": text}}, response_class=Response)
    async def metrics() -> Response:
        """All metrics of this server, with the usage of all keys, or of its own for a key without the scope `admin`."""
        watchdog: LoopWatchdog | None = app.state.loop_watchdog
        usage: KeyUsage = app.state.key_usage
        client = caller()
        others = [usage.registry(None if client.admin else client.key)]
        if watchdog is not None:
            others.append(watchdog.registry)
        return Response(models.render_metrics(*others), media_type=CONTENT_TYPE_LATEST)
