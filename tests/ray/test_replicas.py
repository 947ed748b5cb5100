"""`cellar ray` with two replicas of the bundled model: affinity, equal text, a killed replica."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.fleet.routers import Result, all_conversations, read_stream
from server.replicas.environment import VARIABLES
from tests.e2e.serving import ROOT

pytestmark = pytest.mark.ray
pytest.importorskip("ray", reason="needs Ray Serve: pip install '.[ray]'")

START_SECONDS = 900
REPLICAS = 2
FLAGS = ("--replicas", f"{REPLICAS}", "--threads", "1", "--context", "2048", "--slots", "8", "--store", "memory")
STREAMS = 6
TOKEN = 32 * "c0"


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, psutil.Process]]:
    """The address of the proxy, and the process of the command."""
    with started(*FLAGS) as process:
        yield wait_for_address(process), psutil.Process(process.pid)
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(120)


@contextmanager
def started(*arguments: str, port: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process of the command; it is ended if it still runs."""
    command = [
        sys.executable,
        "-c",
        "from server.cli import main; main()",
        "ray",
        "--port",
        str(port or free_port()),
        *arguments,
    ]
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": folder}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait(120)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def wait_for_address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert process.stderr is not None
    stuck = threading.Timer(START_SECONDS, process.kill)
    stuck.start()
    try:
        for line in process.stdout:
            if found := re.search(r"API +(http://\S+)/v1", line):
                # Ray's processes write to the same pipes.
                for pipe in (process.stdout, process.stderr):
                    threading.Thread(target=pipe.read, daemon=True).start()
                return found.group(1)
    finally:
        stuck.cancel()
    raise AssertionError("the replicas did not start")


def client(address: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=address, timeout=300, trust_env=False)


def test_conversations_meet_their_prefix(cluster: tuple[str, psutil.Process]) -> None:
    """0.776 of the prompt tokens are cached on one server, 0.53 with random routing over three."""
    result = Result("ray")

    async def converse() -> None:
        async with client(cluster[0]) as connection:
            await all_conversations(connection, result)

    asyncio.run(converse())
    assert [] == result.errors
    assert 64 == result.requests
    assert result.cached_share >= 0.95 * 0.776


def test_a_seed_gives_one_text_on_all_replicas(cluster: tuple[str, psutil.Process]) -> None:
    """And each replica has its own metrics."""
    body = {"messages": [{"role": "user", "content": "hi"}], "seed": 7, "temperature": 1.0, "max_tokens": 32}
    texts: dict[str, str] = {}

    async def ask() -> None:
        async with client(cluster[0]) as connection:
            for number in range(40):
                answer = await connection.post(
                    "/v1/chat/completions", json=body, headers={"x-session-id": f"session {number}"}
                )
                texts[answer.headers["x-cellar-replica"]] = answer.json()["choices"][0]["message"]["content"]
            for name in texts:
                metrics = await connection.get("/metrics", headers={"x-cellar-replica": name})
                assert name == metrics.headers["x-cellar-replica"]

    asyncio.run(ask())
    assert 2 == len(texts)
    assert 1 == len(set(texts.values()))


def test_responses_meet_their_conversation(cluster: tuple[str, psutil.Process]) -> None:
    """By previous_response_id alone, at the replica that has their prompt in its cache, and in its own store."""
    replicas: list[str] = []
    cached: list[int] = []

    async def answer(connection: httpx.AsyncClient, number: int) -> None:
        previous, text = None, f"{number} " + "a long first message of the user " * 12
        for _ in range(4):
            body = {"input": text, "previous_response_id": previous, "max_output_tokens": 8}
            created = (await connection.post("/v1/responses", json=body)).raise_for_status()
            replicas.append(f"{number} {created.headers['x-cellar-replica']}")
            cached.append(created.json()["usage"]["input_tokens_details"]["cached_tokens"])
            previous, text = created.json()["id"], "go on"
        read = await connection.get(f"/v1/responses/{previous}")
        assert (200, previous) == (read.status_code, read.json()["id"])

    async def answer_all() -> None:
        async with client(cluster[0]) as connection:
            await asyncio.gather(*(answer(connection, number) for number in range(6)))

    asyncio.run(answer_all())
    assert 6 == len(set(replicas))
    assert 6 * 3 <= sum(tokens > 50 for tokens in cached)


def test_streams_that_clients_leave_at_once_end_on_the_replicas(cluster: tuple[str, psutil.Process]) -> None:
    """Twelve of them: their slots are free, and other streams go on."""

    async def running(connection: httpx.AsyncClient) -> dict[str, int]:
        found: dict[str, int] = {}
        for number in range(100):
            answer = await connection.get("/v1/engine", headers={"x-session-id": f"{number}"})
            counts = answer.json()["counts"]
            found[answer.headers["x-cellar-replica"]] = counts["running"] + counts["waiting"]
            if len(found) == REPLICAS:
                return found
        raise AssertionError("requests meet one replica only")

    async def scene() -> list[str]:
        async with client(cluster[0]) as connection, asyncio.timeout(120):
            begun: list[httpx.Response] = []
            other = asyncio.create_task(read_stream(connection, "stays", 1500, begun.append))
            streams = [
                asyncio.create_task(read_stream(connection, f"{at} leaves", 1500, begun.append)) for at in range(12)
            ]
            while len(begun) < 13:
                await asyncio.sleep(0.01)
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            async with asyncio.timeout(20):
                while sum((await running(connection)).values()) > (not other.done()):
                    await asyncio.sleep(0.1)
            others = await asyncio.gather(*(read_stream(connection, f"next {at}", 8) for at in range(16)))
            return [end for end, _, _ in (await other, *others)]

    assert ["ok"] * 17 == asyncio.run(scene())


def test_a_killed_replica_loses_only_what_it_had_answered(cluster: tuple[str, psutil.Process]) -> None:
    """Its streams end with an error event, waiting requests are repeated on the other one."""

    async def scene() -> Counter[str]:
        async with client(cluster[0]) as connection:
            streams = [asyncio.create_task(read_stream(connection, f"{number} kill", 1500)) for number in range(24)]
            await asyncio.sleep(3)
            replica_processes(cluster[1])[0].kill()
            return Counter([end for end, _, _ in await asyncio.gather(*streams)])

    ends = asyncio.run(scene())
    assert {"ok", "error event"} == ends.keys()
    # No more than the slots of one replica had begun.
    assert ends["error event"] <= 8


def replica_processes(command: psutil.Process) -> list[psutil.Process]:
    found: list[Any] = []
    for each in command.children(recursive=True):
        try:
            if " ".join(each.cmdline()).startswith("ray::ServeReplica"):
                found.append(each)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_streams_end_before_the_command(number: signal.Signals) -> None:
    """With exit code 0, and no process of Ray is left."""
    with started(*FLAGS) as process:
        address = wait_for_address(process)
        children = psutil.Process(process.pid).children(recursive=True)

        async def scene() -> list[str]:
            async with client(address) as connection:
                streams = [asyncio.create_task(read_stream(connection, f"{at} stop", 600)) for at in range(STREAMS)]
                await asyncio.sleep(2)
                process.send_signal(number)
                return [end for end, _, _ in await asyncio.gather(*streams)]

        assert ["ok"] * STREAMS == asyncio.run(scene())
        assert 0 == process.wait(120)
    assert [] == psutil.wait_procs(children, 10)[1]


def test_a_model_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    """Of the reason; each replica has tried once."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with started(str(tmp_path), *FLAGS) as process:
        output, errors = process.communicate(timeout=START_SECONDS)

    assert 1 == process.returncode
    assert "API" not in output
    # Ray's own lines, for example of a full disk, may follow.
    lines = [line for line in errors.splitlines() if line.startswith("cellar: ")]
    assert 1 == len(lines)
    assert f"cellar: cannot serve the model '{tmp_path}': it has no safetensors weights" in lines[0]


@contextmanager
def running_cluster() -> Iterator[str]:
    """The address of a Ray cluster with tokens, which `cellar ray` has not started."""
    port = free_port()
    arguments = ["start", "--head", "--block", "--port", f"{port}", "--num-cpus", "4", "--include-dashboard=false"]
    ports = ["--ray-client-server-port", f"{free_port()}", "--min-worker-port", "0", "--max-worker-port", "0"]
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        environment = {
            **os.environ,
            **VARIABLES,
            "PYTHONPATH": str(ROOT),
            "RAY_TMPDIR": folder,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
        }
        command = [sys.executable, "-m", "ray.scripts.scripts", *arguments, *ports, "--node-ip-address", "127.0.0.1"]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                yield f"127.0.0.1:{port}"
            finally:
                process.terminate()


def wait_until_open(port: int) -> None:
    for _ in range(START_SECONDS):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(1)
    raise AssertionError("the cluster did not start")


def test_commands_on_a_running_cluster_end_their_own_application_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of another command, whether they are refused or replace it."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    flags = ("--replicas", "1", *FLAGS[2:])
    with running_cluster() as cluster, started("--cluster", cluster, *flags) as first:
        address = wait_for_address(first)
        with started("--cluster", cluster, *flags) as second:
            errors = second.communicate(timeout=START_SECONDS)[1]
        assert 1 == second.returncode
        assert "use --host 127.0.0.1 --port" in errors
        assert 200 == httpx.get(f"{address}/v1/models", trust_env=False).status_code

        port = address.rpartition(":")[2]
        with started("--cluster", cluster, *flags, port=int(port)) as third:
            assert address == wait_for_address(third)
            assert 0 == first.wait(60)
            assert 200 == httpx.get(f"{address}/v1/models", trust_env=False).status_code
            third.send_signal(signal.SIGTERM)
            assert 0 == third.wait(120)
        assert 404 == httpx.get(f"{address}/v1/models", trust_env=False).status_code
