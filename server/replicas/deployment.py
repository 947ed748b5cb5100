"""The deployment of Ray Serve: each replica is an engine with its app; the load of all decides their number."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.configuration.logs import configure_logging
from server.configuration.settings import Settings
from server.hosting import create_engine, hosted
from server.http.errors import UNKNOWN_REPLICA, ApiError, error_response
from server.replicas.routing_header import REPLICA_HEADER
from server.terminal.load_screen import LineScreen, print_line

NAME = "cellar"
# Of Ray's processes; replicas write their own access log.
LOGGING = {"log_level": "WARNING", "enable_access_log": False}
# Seconds beyond --grace until Ray kills a replica that it stops.
SHUTDOWN_MARGIN_SECONDS = 10.0
HEALTH_CHECK_SECONDS = 2.0
# A load sends within 30 s a log line at the latest; a step within the watchdog's limit.
HEALTH_TIMEOUT_SECONDS = 30.0
# Share of the capacity of all replicas that autoscaling aims at.
TARGET_UTILIZATION = 0.7
# Seconds of the mean load, and of a lower load before a replica is stopped.
MEAN_SECONDS, DOWNSCALE_SECONDS = 5.0, 60.0


@serve.ingress()
class Replica:
    """One replica. Ray constructs it inside the event loop that serves its requests."""

    async def __init__(self, settings: Settings, revision: str) -> None:  # type: ignore[misc]
        # Ray compares the arguments to decide whether to replace a running replica.
        self._revision = revision
        self._stack = AsyncExitStack()
        configure_logging(settings.log_level, settings.log_format)
        # Ray passes the output of replicas on to the command.
        screen = LineScreen(print_line)
        self._engine = await asyncio.to_thread(
            create_engine, settings, on_phase=screen.set_phase, on_progress=screen.set_progress
        )
        self._app = await self._stack.enter_async_context(hosted(settings, self._engine))
        self._id = serve.get_replica_context().replica_id.unique_id

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The app, with the id of the replica in its responses. `hosted` has begun its lifespan."""
        return ReplicaApp(self._app, self._id)

    async def check_health(self) -> None:
        """Raise RuntimeError if a restart would help."""
        if not self._engine.alive:
            raise RuntimeError(self._engine.phase)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The utilisation: ongoing tokens of the cells, or requests of the slots if they are scarcer."""
        stats = self._engine.stats()
        requests = stats.running + stats.waiting
        # Waiting requests have no cells yet: each counts as a mean running one.
        tokens = stats.cells_used * requests / max(stats.running, 1)
        return {"utilization": max(tokens / max(stats.cells_total, 1), requests / max(stats.slots, 1))}

    async def __del__(self) -> None:
        await self._stack.aclose()


class ReplicaApp:
    """The app of a replica, which adds its id to responses; a request that Ray cancels ends with a disconnect."""

    def __init__(self, app: ASGIApp, id: str) -> None:
        self._app, self._id = app, id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request unless it is for another replica, which has ended; Ray's lifespan has no effect."""
        if scope["type"] == "lifespan":
            await _answer_lifespan(receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REPLICA_HEADER] = self._id
            await send(message)

        if scope["type"] == "http" and Headers(scope=scope).get(REPLICA_HEADER, self._id) != self._id:
            missing = ApiError(UNKNOWN_REPLICA, f"No replica of {REPLICA_HEADER} serves.")
            await error_response(missing, scope["path"])(scope, receive, send_with_id)
            return

        async def receive_until_cancelled() -> Message:
            try:
                return await receive()
            except RayError:
                # The proxy cancels its part of the request as well, or has ended.
                return {"type": "websocket.disconnect" if scope["type"] == "websocket" else "http.disconnect"}

        await self._app(scope, receive_until_cancelled, send_with_id)


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    for event in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{event}.complete"})


def target_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """The number of replicas at which their mean utilisation is TARGET_UTILIZATION; Ray applies the bounds."""
    utilizations: Mapping[object, float] = context.aggregated_metrics.get("utilization", {})
    if not utilizations:
        return context.target_num_replicas, {}
    return max(1, math.ceil(sum(utilizations.values()) / TARGET_UTILIZATION)), {}


def application(
    settings: Settings,
    bounds: tuple[int, int],
    *,
    revision: str = "",
    downscale_seconds: float = DOWNSCALE_SECONDS,
    router: str = "server.replicas.router:AffinityRouter",
) -> serve.Application:
    """The application with its least and most replicas; another `revision` replaces running replicas one by one."""
    low, high = bounds
    scale: dict[str, Any] = {"num_replicas": low}
    if low < high:
        policy = AutoscalingPolicy(policy_function="server.replicas.deployment:target_replicas")
        scale = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=low,
                max_replicas=high,
                policy=policy,
                metrics_interval_s=1,
                look_back_period_s=MEAN_SECONDS,
                upscale_delay_s=MEAN_SECONDS,
                downscale_delay_s=downscale_seconds,
            )
        }
    deployment = serve.deployment(Replica, name=NAME).options(
        max_ongoing_requests=settings.max_waiting + (settings.slots or 8),
        graceful_shutdown_timeout_s=settings.grace_seconds + SHUTDOWN_MARGIN_SECONDS,
        graceful_shutdown_wait_loop_s=1,
        health_check_period_s=HEALTH_CHECK_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT_SECONDS,
        ray_actor_options={"num_cpus": settings.threads or 1},
        request_router_config=RequestRouterConfig(request_router_class=router),
        logging_config=LOGGING,
        # Failures before the first replica serves: a model that does not load fails in all of them.
        max_constructor_retry_count=max(low, 2),
        **scale,
    )
    # Replicas write through their proxy, never to their own socket.
    return deployment.bind(replace(settings, direct_writes=False), revision)
