"""`cellar ray`: replicas on Ray Serve."""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading

from server.commands.option_sources import EXIT_USAGE
from server.configuration.settings import Settings
from server.replicas.options import RayOptions

EXIT_FAILED = 1


def run_ray(options: RayOptions, settings: Settings) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit code."""
    if importlib.util.find_spec("ray") is None:
        return _fail("cellar ray needs Ray Serve: pip install 'kvcellar[ray]'", EXIT_USAGE)
    if settings.port == 0:
        return _fail("--port 0 selects a free port for one process; cellar ray needs a number", EXIT_USAGE)
    from server.replicas import cluster

    low, high = options.bounds
    if options.cluster is None:
        settings = cluster.shared(settings, high)
    ending = threading.Event()
    cluster.start(settings, high, options.cluster)
    # After Ray, which installs handlers of its own.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    try:
        cluster.deploy(settings, (low, high))
        print_line(f"Cellar serves {', '.join(settings.model_names)} with {options.replicas} replicas")
        print_line(f"  API        http://{settings.host}:{settings.port}/v1")
        ending.wait()
        return 0
    except RuntimeError as error:
        return _fail(str(error), EXIT_FAILED)
    finally:
        cluster.stop()


def print_line(text: str) -> None:
    """Show a line to the user."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"cellar: {message}\n")
    return code
