"""The ASGI application over one engine. Whoever makes it starts, drains and closes that engine (lifecycle.py)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from server.http import errors, validation
from server.http.auth import AuthMiddleware
from server.http.lenient import LenientRoute
from server.http.middleware import BodyLimitMiddleware, BoundaryMiddleware
from server.http.origins import OriginsMiddleware
from server.http.parsing import StrictRoute, large_body_limiter
from server.http.paths import ServedPaths
from server.http.version import version
from server.metrics import Metrics
from server.routes import (
    anthropic,
    capabilities,
    chat,
    completions,
    decisions,
    embeddings,
    health,
    metrics,
    models,
    ollama,
    openapi,
    rerank,
    responses,
    score,
    tokens,
)
from server.service import Service
from server.settings import Settings

if TYPE_CHECKING:
    from engine.engine import Engine


def create_app(engine: Engine, settings: Settings) -> FastAPI:
    """The application. From the outside in: Origins, Border, Auth, BodyLimitMiddleware, then the routes."""
    closing = AsyncExitStack()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        async with closing:
            yield

    # The pages of Swagger and ReDoc load scripts from elsewhere, so there are none; telemetry is /metrics.
    app = FastAPI(
        title="Cellar",
        version=version(),
        docs_url=None,
        redoc_url=None,
        # documented.py serves it: to make it takes longer than the event loop may be held.
        openapi_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False},
        lifespan=lifespan,
    )
    app.state.large_bodies = large_body_limiter()
    service = Service(engine, settings, Metrics(engine))
    app.router.route_class = LenientRoute if settings.lenient else StrictRoute
    for routes in (
        capabilities,
        chat,
        completions,
        embeddings,
        rerank,
        score,
        decisions,
        tokens,
        models,
        anthropic,
        ollama,
        health,
        metrics,
    ):
        routes.add(app, service)
    closing.push_async_callback(responses.add(app, service).close)
    openapi.install(app)
    errors.install(app)
    validation.install(app)
    _wrap(app, settings, service.metrics)
    return app


def _wrap(app: FastAPI, settings: Settings, metrics: Metrics) -> None:
    """Put the layers around the routes. The last one added is the outermost."""
    app.add_middleware(BodyLimitMiddleware, limit=settings.limits.body_bytes)
    app.add_middleware(AuthMiddleware, keys=settings.keys)
    app.add_middleware(
        BoundaryMiddleware,
        hosts=settings.hosts,
        origins=settings.origins,
        metrics=metrics,
        paths=ServedPaths(app.routes),
    )
    if settings.origins:
        app.add_middleware(OriginsMiddleware, origins=settings.origins)
