"""The ASGI application of one engine, or of several models. Its caller starts and ends them (lifecycle.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from server.configuration.settings import Settings
from server.http import errors, validation
from server.http.access_log import RefusalLog
from server.http.admission import AdmissionMiddleware
from server.http.auth import ApiKeys, AuthMiddleware, first_owner
from server.http.lenient import LenientRoute, WarningRoute
from server.http.middleware import BodyLimitMiddleware, BoundaryMiddleware, OriginsMiddleware
from server.http.parsing import large_body_limiter
from server.http.paths import ServedPaths
from server.http.refusal import EarlyRefusal
from server.http.version import version
from server.media.fetch import MediaFetcher
from server.media.uploads import MediaReader
from server.metrics.key_usage import KeyUsage
from server.metrics.loop_watchdog import LoopWatchdog
from server.metrics.metrics import Metrics
from server.metrics.traces import GenerationTraces, make_traces
from server.models.entry import ModelEntry
from server.models.lease import LeaseMiddleware
from server.models.load_middleware import LoadMiddleware
from server.models.loader import Launcher, Loader, LoaderLimits
from server.models.loader_metrics import LoaderMetrics
from server.models.registry import ModelRegistry
from server.models.several import SeveralModels
from server.routes import (
    adapters,
    anthropic,
    audio,
    batches,
    capabilities,
    completions,
    engine_state,
    llama,
    model_loads,
    models,
    monitoring,
    ollama,
    openapi,
    page,
    responses,
    scoring,
    tokens,
    worker,
)
from server.service import Service
from server.store.files import open_files
from server.store.store import open_store

if TYPE_CHECKING:
    from engine.client import EngineClient


def create_app(engine: EngineClient, settings: Settings) -> FastAPI:
    """The application of one engine; ValueError or OSError for settings that cannot work."""
    settings.check()
    name, closing = settings.model_names[0], AsyncExitStack()
    media = _media_reader(settings)
    service = Service(engine, settings, Metrics(engine, name), name, _traces(settings, closing), media=media)
    return _make_app(ModelRegistry(service), media, service.metrics, closing)


def create_app_of_several(
    models: Sequence[ModelEntry], launcher: Launcher, limits: LoaderLimits, settings: Settings
) -> FastAPI:
    """The application of several models, which the state `loader` loads; errors as of `create_app`."""
    settings.check()
    closing, observer = AsyncExitStack(), LoaderMetrics()
    app_loader = Loader(models, launcher, limits, observer)
    observer.observe(app_loader)
    media, traces = _media_reader(settings), _traces(settings, closing)
    registry = SeveralModels(settings, models, app_loader, observer, media, traces)
    app = _make_app(registry, media, registry.metrics_of(models[0].name), closing)
    app.state.loader = app_loader
    return app


def _traces(settings: Settings, closing: AsyncExitStack) -> GenerationTraces | None:
    if settings.otlp_traces_endpoint is None:
        return None
    traces = make_traces(settings.otlp_traces_endpoint, settings.model_names[0], version())
    closing.push_async_callback(asyncio.to_thread, traces.close)
    return traces


def _media_reader(settings: Settings) -> MediaReader:
    store = open_store(settings.store)
    files = open_files(None if store is None else store.location, first_owner(*settings.read_keys()))
    return MediaReader(files, MediaFetcher(frozenset(settings.media_hosts)))


def _make_app(registry: ModelRegistry, media: MediaReader, metrics: Metrics, closing: AsyncExitStack) -> FastAPI:
    """The application of a registry. `closing` is closed at its end; `metrics` counts the responses.

    From the outside in: OriginsMiddleware, BoundaryMiddleware, AuthMiddleware, AdmissionMiddleware,
    BodyLimitMiddleware, LeaseMiddleware, with several models LoadMiddleware, then the routes. The state `refuse`
    answers most requests to a full queue without them, if the HTTP server calls it.
    """
    settings = registry.settings

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        async with closing:
            app.state.loop_watchdog = LoopWatchdog()
            closing.callback(app.state.loop_watchdog.stop)
            batch_service.start(app)
            yield

    # No Swagger and ReDoc pages: they load scripts of other hosts. Telemetry is /metrics.
    app = FastAPI(
        title="Cellar",
        version=version(),
        docs_url=None,
        redoc_url=None,
        # routes/openapi.py serves it: building it would block the event loop for too long.
        openapi_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False},
        lifespan=lifespan,
    )
    app.state.large_bodies = large_body_limiter()
    app.state.loop_watchdog = None
    app.state.models = registry
    app.router.route_class = LenientRoute if settings.lenient else WarningRoute
    for routes in (
        adapters,
        capabilities,
        completions,
        llama,
        scoring,
        tokens,
        worker,
        model_loads,
        models,
        anthropic,
        audio,
        ollama,
        monitoring,
        engine_state,
        page,
    ):
        routes.add(app, registry)
    closing.push_async_callback(responses.add(app, registry).close)
    batch_service = batches.add(app, registry, media.files)
    closing.push_async_callback(batch_service.close)
    openapi.install(app)
    errors.install(app)
    validation.install(app)
    _wrap(app, settings, metrics)
    return app


def _wrap(app: FastAPI, settings: Settings, metrics: Metrics) -> None:
    """Add the middleware, the outermost last."""
    limits, keys, has_keys = settings.limits, ApiKeys.of(settings), settings.has_keys
    hosts = ("*",) if has_keys else settings.hosts
    refusals, usage = RefusalLog(), KeyUsage()
    app.state.key_usage = usage
    app.state.refuse = EarlyRefusal(app.state.models.check_admission, keys, hosts, limits, metrics, refusals, usage)
    if isinstance(app.state.models, SeveralModels):
        app.add_middleware(LoadMiddleware, models=app.state.models)
    app.add_middleware(LeaseMiddleware)
    app.add_middleware(BodyLimitMiddleware, limits=limits, reads_media=lambda: app.state.models.reads_media)
    app.add_middleware(AdmissionMiddleware, routes=app.routes)
    app.add_middleware(AuthMiddleware, keys=keys, open_paths=page.open_paths(), usage=usage)
    app.add_middleware(
        BoundaryMiddleware,
        hosts=hosts,
        origins=settings.origins,
        has_keys=has_keys,
        metrics=metrics,
        refusals=refusals,
        paths=ServedPaths(app.routes),
    )
    app.add_middleware(OriginsMiddleware, origins=settings.origins)
