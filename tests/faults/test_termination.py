"""SIGTERM at a real server in each phase: its exit is bounded, streams end with an event, and no process is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.serving import ROOT, read_address

pytestmark = pytest.mark.slow

GRACE_SECONDS = 3
# The grace, the time for the last bytes and for threads, and a busy machine.
MOST_SECONDS = 60
LONG = {"messages": [{"role": "user", "content": "Tell a story."}], "max_tokens": 3000, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 40}


@dataclass(slots=True)
class Server:
    """A server process, its address, and the processes that it started."""

    process: subprocess.Popen[str]
    address: str = ""

    def descendants(self) -> list[psutil.Process]:
        """All processes of its session, and its children, which may have left the session."""
        found = {process.pid: process for process in psutil.Process(self.process.pid).children(recursive=True)}
        for process in psutil.process_iter():
            with suppress(OSError):
                if os.getsid(process.pid) == self.process.pid != process.pid:
                    found[process.pid] = process
        return list(found.values())

    def terminate(self, *signals: signal.Signals, pause: float = 0.5) -> int:
        """Send the signals; the exit code. No process that it started is left."""
        descendants = self.descendants()
        for index, number in enumerate(signals or (signal.SIGTERM,)):
            if index:
                time.sleep(pause)
            self.process.send_signal(number)
        code = self.process.wait(MOST_SECONDS)
        psutil.wait_procs(descendants, timeout=5)
        assert [] == [process for process in descendants if _is_running(process)]
        return code


def _is_running(process: psutil.Process) -> bool:
    """Whether it has not ended; one that has may wait for its new parent."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def started(
    *flags: str, grace: int = GRACE_SECONDS, variables: dict[str, str] | None = None, ready: bool = True
) -> Iterator[Server]:
    """A server on the bundled model; killed at the end if it still runs."""
    options = ["--port", "0", "--context", "4096", "--slots", "4", "--threads", "1", "--grace", f"{grace}"]
    command = [sys.executable, "-c", "from server.cli import main; main()", "serve", *options, *flags]
    environment = {**os.environ, **(variables or {})}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        server = Server(process)
        try:
            if ready:
                server.address = read_address(process)
            yield server
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class Streams:
    """Streams of a server, read by threads to their end."""

    def __init__(self, address: str, body: dict[str, Any], count: int) -> None:
        self._events: list[list[str]] = [[] for _ in range(count)]
        self._begun = threading.Barrier(count + 1)
        self._threads = [
            threading.Thread(target=self._read, args=(address, body, events), daemon=True) for events in self._events
        ]
        for thread in self._threads:
            thread.start()
        self._begun.wait(MOST_SECONDS)

    def _read(self, address: str, body: dict[str, Any], events: list[str]) -> None:
        path, streamed = f"{address}/v1/chat/completions", {**body, "stream": True}
        with httpx.stream("POST", path, json=streamed, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
                    if len(events) == 2:
                        self._begun.wait(MOST_SECONDS)

    def ends(self) -> list[str]:
        """The last event of each: "[DONE]", or the code of its error."""
        for thread in self._threads:
            thread.join(MOST_SECONDS)
        last = [events[-1] for events in self._events]
        return [event if event == "[DONE]" else json.loads(event)["error"]["code"] for event in last]


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0, 2.0, 3.0, 4.0, 6.0])
def test_while_it_starts(seconds: float) -> None:
    """Before the port is open the signal ends the process as any other; then the exit code is 0."""
    with started(ready=False) as server:
        time.sleep(seconds)

        assert server.terminate() in (0, -signal.SIGTERM)


@pytest.mark.parametrize(("body", "end"), [(SHORT, "[DONE]"), (LONG, "server_draining")])
def test_while_streams_run(body: dict[str, Any], end: str) -> None:
    """Those that end within the grace are whole; others end with an error event."""
    with started() as server:
        streams = Streams(server.address, body, 6)

        assert 0 == server.terminate()
        assert {end} == set(streams.ends())


@pytest.mark.parametrize("signals", [[signal.SIGTERM] * 2, [signal.SIGTERM, signal.SIGINT], [signal.SIGTERM] * 5])
def test_several_signals(signals: Sequence[signal.Signals]) -> None:
    with started(grace=30) as server:
        streams, begin = Streams(server.address, LONG, 6), time.monotonic()

        assert 0 == server.terminate(*signals)
        assert {"server_draining"} == set(streams.ends())
        assert time.monotonic() - begin < 25


def _post(address: str, path: str, content: str, length: int) -> socket.socket:
    """A request of which so many bytes of the body are missing."""
    host, port = address.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=MOST_SECONDS)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: multipart/form-data; boundary=B\r\n"
    client.sendall(f"{head}Content-Length: {len(content) + length}\r\n\r\n{content}".encode())
    return client


def test_while_a_file_is_uploaded(tmp_path: Path) -> None:
    """Nothing of it is stored; what was stored before is there afterwards."""
    store = ["--store", str(tmp_path / "store.sqlite")]
    form = (
        '--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        '--B\r\nContent-Disposition: form-data; name="file"; filename="slow.jsonl"\r\n\r\n' + "x" * 300_000
    )
    with started(*store) as server:
        answer = httpx.post(
            f"{server.address}/v1/files", files={"file": ("whole.jsonl", b"{}")}, data={"purpose": "batch"}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        with closing(_post(server.address, "/v1/files", form, 10**6)) as client:
            time.sleep(1)

            assert 0 == server.terminate()
            with suppress(ConnectionResetError):
                assert b"server_draining" in client.recv(2**16)
    with started(*store) as server:
        files = httpx.get(f"{server.address}/v1/files", timeout=60).json()["data"]
        content = httpx.get(f"{server.address}/v1/files/{files[0]['id']}/content", timeout=60).content

    assert ["whole.jsonl"] == [file["filename"] for file in files]
    assert b"{}" == content


def test_while_a_batch_runs(tmp_path: Path) -> None:
    """The next server goes on with it; each line has one result."""
    store = ["--store", str(tmp_path / "store.sqlite")]
    lines: list[dict[str, Any]] = [
        {"custom_id": f"{number}", "method": "POST", "url": "/v1/chat/completions", "body": {**SHORT, "max_tokens": 60}}
        for number in range(60)
    ]
    with started(*store) as server:
        content = "\n".join(map(json.dumps, lines)).encode()
        files = {"file": ("lines.jsonl", content)}
        file = httpx.post(f"{server.address}/v1/files", files=files, data={"purpose": "batch"}, timeout=60).json()
        request = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = httpx.post(f"{server.address}/v1/batches", json=request, timeout=60).json()
        path = f"/v1/batches/{batch['id']}"
        while (httpx.get(f"{server.address}{path}", timeout=60).json())["request_counts"]["completed"] < 5:
            time.sleep(0.05)

        assert 0 == server.terminate()
    with started(*store) as server:
        give_up = time.monotonic() + 240
        while (after := httpx.get(f"{server.address}{path}", timeout=60).json())["status"] != "completed":
            assert time.monotonic() < give_up, after
            time.sleep(0.2)
        output = httpx.get(f"{server.address}/v1/files/{after['output_file_id']}/content", timeout=60).text
    results = [json.loads(line) for line in output.splitlines()]

    assert {"completed": 60, "failed": 0, "total": 60} == after["request_counts"]
    assert sorted(line["custom_id"] for line in lines) == sorted(result["custom_id"] for result in results)
    assert {60} == {result["response"]["body"]["usage"]["completion_tokens"] for result in results}


def test_while_a_model_is_pulled(tmp_path: Path) -> None:
    """From a hub that does not answer: the download process ends too."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        variables = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HUB_CACHE": str(tmp_path)}
        with started(variables=variables) as server:
            pull = httpx.Client(timeout=60).stream(
                "POST", f"{server.address}/api/pull", json={"model": "someone/model"}
            )
            with pull as answer:
                lines = answer.iter_lines()
                assert "pulling manifest" in next(lines)
                with closing(hub.accept()[0]):
                    assert 0 == server.terminate()
                with suppress(httpx.HTTPError):
                    assert [] == [line for line in lines if "success" in line]


def test_while_a_background_response_runs(tmp_path: Path) -> None:
    """It is stored as failed or incomplete, never as running."""
    store = ["--store", str(tmp_path / "store.sqlite")]
    with started(*store) as server:
        body = {"input": "Tell a story.", "max_output_tokens": 3000, "background": True}
        response = httpx.post(f"{server.address}/v1/responses", json=body, timeout=60).json()
        time.sleep(0.5)

        assert 0 == server.terminate()
    with started(*store) as server:
        after = httpx.get(f"{server.address}/v1/responses/{response['id']}", timeout=60).json()

    assert after["status"] in ("completed", "failed", "incomplete", "cancelled")


def test_with_several_models() -> None:
    """Their processes end too, whether idle, computing or loading."""
    with started("--models", str(ROOT / "models")) as server:
        name = httpx.get(f"{server.address}/v1/models", timeout=60).json()["data"][0]["id"]
        streams = Streams(server.address, {**LONG, "model": name}, 2)

        assert 0 == server.terminate()
        assert set(streams.ends()) <= {"[DONE]", "server_draining"}
