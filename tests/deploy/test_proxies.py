"""The recipes for nginx, Caddy and systemd, in the real programs where they are installed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect

from engine.types.events import Delta, Event, Started
from engine.types.request import Request
from tests.e2e.serving import ROOT
from tests.server.fakes import FakeEngine, Gate, finished, serve_in_thread, settings

DEPLOY = ROOT / "deploy"
PATIENCE_SECONDS = 20.0
BODY = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def nginx(upstream: int, folder: Path) -> tuple[list[str], int]:
    """The command of an nginx with the recipe, without TLS, and its port."""
    port, recipe = free_port(), (DEPLOY / "nginx" / "cellar.conf").read_text()
    for text, other in (
        ("listen 443 ssl http2;", f"listen 127.0.0.1:{port};"),
        ("server 127.0.0.1:8000;", f"server 127.0.0.1:{upstream};"),
    ):
        assert text in recipe
        recipe = recipe.replace(text, other)
    recipe = "".join(line for line in recipe.splitlines(keepends=True) if "ssl_certificate" not in line)
    (folder / "recipe.conf").write_text(recipe)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    (folder / "nginx.conf").write_text(
        f"{'user root; ' if os.geteuid() == 0 else ''}daemon off; pid {folder}/pid; error_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{places}include {folder}/recipe.conf;\n}}\n"
    )
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")], port


def caddy(upstream: int, folder: Path) -> tuple[list[str], int]:
    """The command of a Caddy with the recipe, without TLS, and its port."""
    port, recipe = free_port(), (DEPLOY / "caddy" / "Caddyfile").read_text()
    for text, other in (("llm.example.org {", f"http://:{port} {{"), ("127.0.0.1:8000", f"127.0.0.1:{upstream}")):
        assert text in recipe
        recipe = recipe.replace(text, other)
    (folder / "Caddyfile").write_text("{\n\tadmin off\n}\n" + recipe)
    return ["caddy", "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")], port


PROXIES: dict[str, Callable[[int, Path], tuple[list[str], int]]] = {"nginx": nginx, "caddy": caddy}


@contextmanager
def proxied(kind: str, engine: FakeEngine, folder: Path) -> Iterator[str]:
    """The URL of a proxy in front of a server."""
    if shutil.which(kind) is None:
        pytest.skip(f"{kind} is not installed")
    using = settings(allowed_hosts=("127.0.0.1",), limits={"ping_seconds": 0.2})
    with serve_in_thread(engine, using) as upstream:
        command, port = PROXIES[kind](upstream, folder)
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env={"HOME": str(folder), "PATH": "/usr/sbin:/usr/bin:/bin"}
            )
        try:
            url = f"http://127.0.0.1:{port}"
            give_up = time.monotonic() + PATIENCE_SECONDS
            while not _answers(f"{url}/health"):
                assert time.monotonic() < give_up, (folder / "log").read_text()
                time.sleep(0.05)
            yield url
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("kind", PROXIES)
def test_a_stream_is_not_buffered(kind: str, tmp_path: Path) -> None:
    """Each token arrives before the next one is made; a client that leaves frees its slot."""
    gate = Gate()

    def script(request: Request) -> Iterator[Event | Gate]:
        yield Started(1, 0, 0)
        yield Delta("first", (1,))
        yield gate
        yield Delta("second", (2,))
        yield finished(request)

    engine = FakeEngine(script=script)
    with proxied(kind, engine, tmp_path) as url:
        with streamed(url) as lines:
            assert any("first" in line for line in lines)
            assert gate.reached.wait(PATIENCE_SECONDS)
            gate.open()
            assert any("second" in line for line in lines)
        gate = Gate()
        engine.left.clear()
        with streamed(url) as lines:
            assert any("first" in line for line in lines)
        assert engine.left.wait(PATIENCE_SECONDS)


@contextmanager
def streamed(url: str) -> Iterator[Iterator[str]]:
    """The lines of a streamed answer, as they arrive."""
    body = {**BODY, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, trust_env=False) as answer:
        yield answer.iter_lines()


@pytest.mark.parametrize("kind", PROXIES)
def test_errors_large_bodies_and_metrics(kind: str, tmp_path: Path) -> None:
    """The server's own errors arrive, a file of 10 MB passes, and the metrics stay inside."""
    with proxied(kind, FakeEngine(), tmp_path) as url, httpx.Client(trust_env=False) as client:
        assert 404 == client.get(f"{url}/metrics").status_code
        wrong = client.post(f"{url}/v1/chat/completions", json={})
        assert (400, "messages") == (wrong.status_code, wrong.json()["error"]["param"])
        large = client.post(f"{url}/v1/chat/completions", json={**BODY, "user": "x" * 5_000_000})
        assert 413 == large.status_code
        stored = client.post(f"{url}/v1/files", files={"file": bytes(10_000_000)}, data={"purpose": "batch"})
        assert 10_000_000 == stored.json()["bytes"]


@pytest.mark.parametrize("kind", PROXIES)
def test_websockets_pass(kind: str, tmp_path: Path) -> None:
    """The WebSocket mode of /v1/responses, with and without the prefix."""
    with proxied(kind, FakeEngine(), tmp_path) as url:
        for path in ("/v1/responses", "/responses"):
            with connect(f"{url.replace('http', 'ws')}{path}") as socket:
                socket.send(json.dumps({"type": "response.create", "model": "fake", "input": "hi", "store": False}))
                kinds = iter(lambda: json.loads(socket.recv(PATIENCE_SECONDS))["type"], "response.completed")
                assert "response.created" in list(kinds)


def test_the_unit_is_valid(tmp_path: Path) -> None:
    """systemd's own check; the program of the unit is not installed here."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    unit = (DEPLOY / "systemd" / "cellar.service").read_text()
    assert "ExecStart=/opt/cellar/bin/cellar serve" in unit
    (tmp_path / "cellar.service").write_text(unit.replace("/opt/cellar/bin/cellar serve", "/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", tmp_path / "cellar.service"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (0, "") == (checked.returncode, "\n".join(line for line in checked.stderr.splitlines() if "cellar" in line))
