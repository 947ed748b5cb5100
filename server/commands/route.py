"""`cellar route`: one address in front of several replicas."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence

import httpx
import uvicorn

from server.configuration.settings import ClientLimits
from server.http.protocol import strict_protocol
from server.replicas.front_door import front_door
from server.terminal.load_screen import print_line

# Of open requests after a signal.
GRACE_SECONDS = 30


def check_addresses(urls: Sequence[str]) -> None:
    """Raise ValueError for anything but base URLs."""
    if not urls or not all(_is_base_url(url) for url in urls):
        raise ValueError("cellar route needs addresses such as http://127.0.0.1:8001, without a path")


def run_route(urls: Sequence[str], listening: socket.socket) -> None:
    """Serve on `listening` until SIGTERM or SIGINT."""
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print_line(f"cellar: http://{shown}:{port}/v1 passes requests on to {len(urls)} replicas")
    limits = ClientLimits()
    config = uvicorn.Config(
        front_door(urls),
        http=strict_protocol(limits, None, direct_writes=False),
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=limits.keep_alive_seconds,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    # uvicorn raises the signals that it has handled once more.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    uvicorn.Server(config).run(sockets=[listening])


def _is_base_url(text: str) -> bool:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host) and url.path in ("", "/") and not url.query
