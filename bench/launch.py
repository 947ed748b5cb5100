"""Starts a server as a process of its own, which shares no interpreter with the client."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from bench.target import BenchError

CELLAR = (sys.executable, "-c", "from server.cli import main; main()", "serve")
PORT = "{port}"
# Includes the download of weights from the hub.
READY_SECONDS, END_SECONDS = 3600.0, 60.0
LOG_LINES = 5


@contextmanager
def cellar(
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> Iterator[str]:
    """Start `cellar serve` with these arguments; yield its base URL when it is ready, end it after.

    While it loads, `on_wait` is called with the URL of its server a few times a second.
    """
    command = (*CELLAR, *arguments, "--host", "127.0.0.1", "--port", PORT)
    with started(command, ready="/ready", log=log, environment=environment, on_wait=on_wait) as url:
        yield url


@contextmanager
def started(
    command: Sequence[str],
    *,
    ready: str,
    log: Path,
    environment: Mapping[str, str] | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> Iterator[str]:
    """Start any server, with a free port for {port}; yield its base URL once `ready` answers 200, end it after.

    Within the block SIGTERM is a KeyboardInterrupt: the server must not outlive this process. For the main thread only.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.replace(PORT, str(port)) for word in command]
    with log.open("wb") as out:
        try:
            server = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **(environment or {})},
                # Ctrl-C on the terminal is for this process alone.
                process_group=0,
            )
        except OSError as error:
            raise BenchError(f"{words[0]} cannot be started: {error}") from error
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        wait_until_ready(server, f"http://127.0.0.1:{port}", ready, log, on_wait)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        signal.signal(signal.SIGTERM, before)
        server.terminate()
        try:
            server.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def wait_until_ready(
    server: subprocess.Popen[bytes], url: str, ready: str, log: Path, on_wait: Callable[[str], None] | None
) -> None:
    """Wait until the server is ready; BenchError if it ends before or takes an hour."""
    give_up = time.monotonic() + READY_SECONDS
    while server.poll() is None and time.monotonic() < give_up:
        try:
            if httpx.get(url + ready, trust_env=False).status_code == 200:
                return
            if on_wait is not None:
                on_wait(url)
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    raise BenchError(f"the server did not become ready; the end of its log {log}:\n{tail}")
