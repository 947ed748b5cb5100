"""The ASGI application over one engine. Whoever makes it starts, drains and closes that engine (lifecycle.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from server import errors
from server.auth import Auth
from server.limits import BodyLimit, Border
from server.metrics import Metrics
from server.parsing import StrictRoute
from server.routes import chat, completions, documented, health, metrics, models
from server.service import Service
from server.settings import Settings
from server.version import version

if TYPE_CHECKING:
    from engine.engine import Engine


def create_app(engine: Engine, settings: Settings) -> FastAPI:
    """The application. From the outside in: Border, Auth, BodyLimit, then the routes."""
    # The pages of Swagger and ReDoc load scripts from elsewhere, so there are none; telemetry is /metrics.
    app = FastAPI(
        title="Cellar",
        version=version(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False},
    )
    service = Service(engine, settings, Metrics(engine))
    app.router.route_class = StrictRoute
    for routes in (chat, completions, models, health, metrics):
        routes.add(app, service)
    documented.install(app)
    errors.install(app)
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, limit=settings.caps.body_bytes)
    app.add_middleware(Auth, keys=settings.keys)
    app.add_middleware(Border, hosts=settings.hosts, metrics=service.metrics)
    return app
