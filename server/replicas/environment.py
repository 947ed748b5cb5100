"""Environment variables of Ray, some of which it reads when it is imported."""

from __future__ import annotations

import os

VARIABLES = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "server.replicas.proxy:middlewares",
    # It ends replicas on a machine with little free memory, which --memory limits already.
    "RAY_memory_monitor_refresh_ms": "0",
    # By default replicas yield to all other processes of the machine.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # The output of replicas is shown by the command: without colours, and each line although another one is similar.
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEDUP_LOGS": "0",
}


def set_environment() -> None:
    """Set all variables that are not set."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
