"""Finds out about the server and this machine; starts a server of ours on the bundled model where asked to."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent
LOCAL = ("127.0.0.1", "localhost", "::1")


class Unusable(Exception):
    """The benchmark cannot start; the text says what to change."""


def check_url(url: str, allow_remote: bool) -> str:
    """Return the base URL without its last slash; refuse what is not HTTP, and other machines unless allowed."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Unusable(f"--base-url must look like http://127.0.0.1:8000/v1, not {url!r}")
    if parts.hostname not in LOCAL and not allow_remote:
        raise Unusable(f"{parts.hostname} is another machine: this sends much load, so say --allow-remote if you may")
    return url.rstrip("/")


def ask_models(url: str, api_key: str | None) -> dict[str, Any]:
    """Return what /v1/models answers."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url}/models", headers=headers, timeout=30, trust_env=False)
        answer.raise_for_status()
        models: dict[str, Any] = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise Unusable(f"{url}/models does not answer: {error}") from error
    return models


def only_model(url: str, models: dict[str, Any]) -> str:
    """Return the id of the first model that a server names."""
    try:
        return str(models["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise Unusable(f"{url}/models names no model: say --model") from error


def environment() -> dict[str, Any]:
    """Return what a reader must know of this machine to judge the figures."""
    return {
        "cpu": cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": os.getloadavg(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "httpx": httpx.__version__,
        "commit": commit(),
    }


def cpu_model() -> str:
    """Return the name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str | None:
    """Return the commit of this checkout, with "+" where files differ from it; None outside a checkout."""
    head = git("rev-parse", "--short=12", "HEAD")
    return head and head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def git(*arguments: str) -> str | None:
    """Return what git prints, None where it fails or is missing."""
    try:
        run = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


@contextmanager
def serving(arguments: str, log: Path) -> Iterator[str]:
    """Start `cellar serve` with more arguments on a free port, yield its base URL when it is ready, end it after."""
    cellar = Path(sys.executable).with_name("cellar")
    if not cellar.exists():
        raise Unusable(f"--serve needs {cellar}: install the project into this environment first")
    with started(f"{shlex.quote(str(cellar))} serve {arguments} --port {{port}}", ready="/ready", log=log) as url:
        yield url


@contextmanager
def started(command: str, *, ready: str, log: Path) -> Iterator[str]:
    """Start any server, with a free port for {port}; yield its base URL once `ready` answers 200, end it after."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = shlex.split(command.replace("{port}", str(port)))
    with log.open("wb") as out:
        try:
            server = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
        except OSError as error:
            raise Unusable(f"{words[0]} cannot be started: {error}") from error
    try:
        wait_until_ready(server, f"http://127.0.0.1:{port}{ready}", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(timeout=60)


def wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Return once the server is ready; Unusable if it ends first or takes five minutes."""
    give_up = time.monotonic() + 300
    while server.poll() is None and time.monotonic() < give_up:
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise Unusable(f"the server did not get ready; its output is in {log}")
