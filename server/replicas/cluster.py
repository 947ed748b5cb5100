"""Ray Serve on this machine or on a running cluster."""

from __future__ import annotations

import os
from dataclasses import replace

import ray
from ray import serve

from engine.load.resources import processor_count
from server.configuration.settings import Settings
from server.replicas.deployment import NAME, application

# Read by Ray's processes, so they are set before it starts.
ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "server.replicas.proxy:middlewares",
    # It ends replicas on a machine with little free memory, which --memory limits already.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# Values travel in requests; the object store holds none.
OBJECT_STORE_BYTES = 100 * 2**20
# Beside the replicas: the proxy and the controller.
OTHER_PROCESSORS = 2


def start(settings: Settings, high: int, address: str | None = None) -> None:
    """Start Ray here, or connect to a cluster, and open the port. The proxy stays when replicas are replaced.

    high  most replicas
    """
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    if address is None:
        ray.init(
            num_cpus=high * (settings.threads or 1) + OTHER_PROCESSORS,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level="warning",
        )
    else:
        ray.init(address, logging_level="warning")
    serve.start(http_options={"host": settings.host, "port": settings.port})


def shared(settings: Settings, high: int) -> Settings:
    """The settings of one of several replicas on this machine: its part of the processors and of the memory."""
    threads = settings.threads or max(processor_count() // high, 1)
    return replace(settings, threads=threads, memory=settings.memory or f"{90 / high:.1f}%")


def deploy(settings: Settings, bounds: tuple[int, int], **options: object) -> None:
    """Run the application and wait until it answers; raises RuntimeError if a replica cannot start."""
    serve.run(application(settings, bounds, **options), name=NAME, route_prefix="/")  # type: ignore[arg-type]


def stop() -> None:
    """Drain all replicas and end Ray, if it was started here."""
    serve.shutdown()
    ray.shutdown()
