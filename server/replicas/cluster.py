"""Ray Serve on this machine or on a running cluster."""

from __future__ import annotations

import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import psutil
import ray
from ray import serve
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.serve import context
from ray.serve.schema import ApplicationStatus, DeploymentStatusOverview

from engine.load.machine.resources import processor_count
from server.configuration.settings import Settings
from server.replicas.deployment import LOGGING, NAME, SHUTDOWN_MARGIN_SECONDS, application
from server.replicas.environment import set_environment

# In the key-value store of the cluster.
OWNER_KEY = b"cellar:owner"
CONNECT_SECONDS, END_SECONDS = 5.0, 5.0
# Between two looks at replicas that load, and between two calls that show them.
POLL_SECONDS, WAIT_SECONDS = 0.5, 15.0
AUTHENTICATION_HINT = "its token, if it has one, is expected in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
_exception_line = re.compile(r"[\w.]*(Error|Exception|Missing|Unsupported|TooLarge|Dead): ")
# Values travel in requests; the object store holds none.
OBJECT_STORE_BYTES = 100 * 2**20
# Beside the replicas: the proxy and the controller.
OTHER_PROCESSORS = 2


class ClusterError(Exception):
    """Ray or the replicas cannot start; the text is for the user."""


def start(settings: Settings, high: int, address: str | None = None) -> None:
    """Start Ray here, or connect to a cluster, and open the port. The proxy stays when replicas are replaced.

    high  most replicas

    Raises ClusterError. Ray replaces the handlers of SIGTERM and SIGINT.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    set_environment(running_cluster=address is not None)
    try:
        if address is None:
            _start_here(settings, high)
        else:
            _check_answers(address)
            ray.init(address, logging_level="error")
    except Exception as error:
        # Ray raises Exception itself, for example for a start of more than 30 seconds.
        what = "does not start" if address is None else f"does not answer at {address} ({AUTHENTICATION_HINT})"
        raise ClusterError(f"Ray {what}: {error}") from error


def _start_here(settings: Settings, high: int) -> None:
    ray.init(
        # Otherwise another cluster of this machine is used, if there is one.
        "local",
        num_cpus=high * (settings.threads or 1) + OTHER_PROCESSORS,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=OBJECT_STORE_BYTES,
        logging_level="error",
    )


def _check_answers(address: str) -> None:
    """Raise OSError if nothing accepts connections at an address with a port; Ray itself waits for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()


def open_port(settings: Settings) -> None:
    """Start the proxies of Ray Serve. Raises ClusterError if those of a running Serve have another address."""
    options = {"host": settings.host, "port": settings.port}
    try:
        # Its errors are tracebacks of replicas, which `deploy` and `running` report.
        serve.start(http_options=options, logging_config={**LOGGING, "log_level": "CRITICAL"})
    except (RayError, RuntimeError, TimeoutError) as error:
        raise ClusterError(f"the proxy of Ray Serve does not start: {error}") from error
    running = context._get_global_client().http_config
    if (running.host, running.port) != (settings.host, settings.port):
        raise ClusterError(
            f"Ray Serve runs on {running.host}:{running.port} of this cluster already: use --host {running.host} "
            f"--port {running.port}, or end it with `serve shutdown`"
        )


def shared(settings: Settings, high: int) -> Settings:
    """The settings of one of several replicas on this machine: its part of the processors and of the memory."""
    threads = settings.threads or max(processor_count() // high, 1)
    return replace(settings, threads=threads, memory=settings.memory or f"{90 / high:.1f}%")


def deploy(
    settings: Settings,
    bounds: tuple[int, int],
    *,
    on_wait: Callable[[int, float], None] = lambda running, seconds: None,
    **options: object,
) -> str:
    """Run the application and wait until its replicas serve, as long as the model needs to load; returns the `owner`.

    on_wait  called every WAIT_SECONDS with the replicas that serve, and the seconds since the beginning

    Raises ClusterError if a replica cannot start.
    """
    built = application(settings, bounds, **options)  # type: ignore[arg-type]
    begun, pause = time.monotonic(), threading.Event()
    shown = begun
    try:
        serve.run_many([serve.RunTarget(built, NAME, "/")], wait_for_applications_running=False)
        while not _serves():
            pause.wait(POLL_SECONDS)
            if time.monotonic() - shown >= WAIT_SECONDS:
                shown = time.monotonic()
                on_wait(running(), shown - begun)
        name = secrets.token_hex(8)
        _internal_kv_put(OWNER_KEY, name.encode())
        return name
    except (RayError, RuntimeError, KeyError) as error:
        raise ClusterError(str(error) or "the application on Ray Serve was ended") from error


def _serves() -> bool:
    """Whether all replicas serve. Raises ClusterError if one cannot start."""
    application = serve.status().applications[NAME]
    if application.status == ApplicationStatus.DEPLOY_FAILED:
        raise ClusterError(_reason() or application.message)
    return bool(application.status == ApplicationStatus.RUNNING)


def owner() -> str | None:
    """The name of the last deployment with replicas that served, by whichever command; None without an application."""
    if not ray.is_initialized():
        return None
    with suppress(RayError, RuntimeError):
        if NAME in serve.status().applications:
            return (_internal_kv_get(OWNER_KEY) or b"").decode()
    return None


def running() -> int:
    """Replicas that serve. Raises ClusterError if the application or Ray has ended."""
    try:
        return int(_deployment().replica_states.get("RUNNING", 0))
    except (KeyError, RayError, RuntimeError) as error:
        raise ClusterError("the application on Ray Serve was ended") from error


def _reason() -> str:
    """The last error of a replica that does not start, the last line of its traceback; "" without one."""
    with suppress(KeyError):
        lines = [line for line in _deployment().message.splitlines() if _exception_line.match(line)]
        return _exception_line.sub("", lines[-1]) if lines else ""
    return ""


def _deployment() -> DeploymentStatusOverview:
    return serve.status().applications[NAME].deployments[NAME]


def stop(grace_seconds: float, *, delete: bool = True) -> None:
    """Drain the replicas, then end Ray here or leave the cluster. KeyboardInterrupt ends the drain.

    delete  whether the application ends, too, in a cluster that goes on
    """
    started = psutil.Process().children(recursive=True)
    if ray.is_initialized():
        with suppress(KeyboardInterrupt):
            if delete:
                _drain(grace_seconds + SHUTDOWN_MARGIN_SECONDS)
        ray.shutdown()
    # After an interrupted start of Ray, its agents outlive it.
    for process in psutil.wait_procs(started, END_SECONDS)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _drain(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    # A call waits for up to 60 seconds.
    while time.monotonic() < deadline:
        with suppress(TimeoutError):
            serve.delete(NAME)
            return
