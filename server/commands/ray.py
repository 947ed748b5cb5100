"""`cellar ray`: replicas on Ray Serve."""

from __future__ import annotations

import importlib.util
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial

from rich.console import Console

from engine.errors import ModelError
from engine.types.progress import progress_to
from server.commands.option_sources import EXIT_USAGE
from server.configuration.settings import Settings
from server.replicas.environment import set_environment
from server.replicas.options import RayOptions
from server.terminal.load_screen import load_screen, print_line

EXIT_FAILED, EXIT_MODEL = 1, 78
WATCH_SECONDS = 2.0


def run_ray(options: RayOptions, settings: Settings) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit code. A second signal ends the drain of running requests."""
    if not _has_ray():
        return _fail("cellar ray needs Ray Serve; in a checkout of Cellar: pip install '.[ray]'", EXIT_USAGE)
    if settings.port == 0:
        return _fail("--port 0 selects a free port for one process; cellar ray needs a number", EXIT_USAGE)
    _interrupt_by_signals()
    try:
        return (options.cluster is None and _check_here(settings)) or _serve(options, settings)
    except (KeyboardInterrupt, SystemExit):
        # While Ray starts, its own handler of SIGTERM raises SystemExit.
        return 0


def _has_ray() -> bool:
    return importlib.util.find_spec("ray") is not None


def _check_here(settings: Settings) -> int:
    """The exit code for an address or a model that replicas on this machine cannot use; 0: they can."""
    from engine.load.read.checkpoint import resolve

    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        with socket.socket(family) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((settings.host, settings.port))
    except OSError as error:
        return _fail(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}", EXIT_FAILED)
    screen = load_screen(Console(highlight=False), print_line, "resolve")
    try:
        # Downloaded once, before several replicas load it.
        with progress_to(screen.set_progress):
            resolve(settings.model)
    except ModelError as error:
        return _fail(str(error), EXIT_MODEL)
    finally:
        screen.stop()
    return 0


def _serve(options: RayOptions, settings: Settings) -> int:
    """Serve until KeyboardInterrupt; the exit code of an error before."""
    set_environment(running_cluster=options.cluster is not None)
    from server.replicas import cluster

    low, high = options.bounds
    shared = cluster.shared(settings, high) if options.cluster is None else settings
    earlier = deployed = None
    try:
        print_line(f"cellar: Ray {'starts' if options.cluster is None else f'at {options.cluster}'}")
        cluster.start(shared, high, options.cluster)
        _interrupt_by_signals()
        earlier = cluster.owner()
        cluster.open_port(shared)
        print_line(f"cellar: {low} replica{'' if low == 1 else 's'} load the model")
        deployed = cluster.deploy(shared, (low, high), on_wait=partial(_show_load, low))
        print_line(f"Cellar serves {', '.join(settings.model_names)} on Ray, replicas: {options.replicas}")
        print_line(f"  API        http://{settings.host}:{settings.port}/v1")
        _watch(cluster.running, lambda: cluster.owner() in (deployed, None))
        print_line("cellar: another command has replaced the application")
    except cluster.ClusterError as error:
        return _fail(str(error), EXIT_FAILED)
    finally:
        cluster.stop(settings.grace_seconds, delete=_is_owned(earlier, deployed, cluster.owner()))
    return 0


def _is_owned(earlier: str | None, deployed: str | None, current: str | None) -> bool:
    """Whether an application belongs to this command, by the names of deployments.

    earlier   the one before this command
    deployed  the one of this command; None if its replicas did not start: then those before may still serve
    """
    return current is not None and (current == deployed if deployed is not None else earlier is None)


def _show_load(count: int, running: int, seconds: float) -> None:
    print_line(f"cellar: {running} of {count} replicas serve after {seconds:.0f} s")


def _watch(running: Callable[[], int], is_current: Callable[[], bool]) -> None:
    """Show changes of the number of replicas until the application is that of another command."""
    shown, pause = running(), threading.Event()
    while is_current():
        pause.wait(WATCH_SECONDS)
        if (count := running()) != shown:
            shown = count
            print_line(f"cellar: {count} replica{'' if count == 1 else 's'} serving")


def _interrupt_by_signals() -> None:
    """SIGTERM and SIGINT raise KeyboardInterrupt in the main thread. Ray replaces their handlers when it starts."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"cellar: {message}\n")
    return code
