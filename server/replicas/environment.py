"""Environment variables of Ray, some of which it reads when it is imported."""

from __future__ import annotations

import os
from pathlib import Path

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


# Places of the token of a running cluster.
TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def set_environment(*, running_cluster: bool = False) -> None:
    """Set all variables that are not set.

    running_cluster  the token of this machine is sent, which Ray does of itself only in a cluster that it starts
    """
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    if running_cluster and has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def has_token() -> bool:
    """Whether Ray finds a token: in a variable, or in the file that it writes."""
    return any(os.environ.get(name) for name in TOKENS) or (Path.home() / ".ray" / "auth_token").is_file()
