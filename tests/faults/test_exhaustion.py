"""A real server without file descriptors or threads: it refuses what it cannot do, and goes on when it can again."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import httpx
import psutil
import pytest

from tests.e2e.serving import ROOT, read_address

pytestmark = pytest.mark.slow

BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0}
GRAMMAR = {**BODY, "response_format": {"type": "json_object"}}


@contextmanager
def limited(descriptors: int, log: IO[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on the bundled model with so many descriptors, and its address."""
    options = ["--port", "0", "--context", "1024", "--slots", "4", "--threads", "1"]
    command = [sys.executable, "-c", "from server.cli import main; main()", "serve", *options]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors)),
    ) as server:
        try:
            yield server, read_address(server)
        finally:
            server.terminate()
            assert 0 == server.wait(60)


def ask(address: str, body: dict[str, object] = BODY) -> tuple[int, str]:
    """The status of a chat, and its text or the code of its error."""
    answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=120)
    content = answer.json()
    if answer.is_success:
        return answer.status_code, content["choices"][0]["message"]["content"]
    return answer.status_code, content["error"]["code"]


def test_64_descriptors_and_200_connections(tmp_path: Path) -> None:
    """Some are closed or refused; those that are answered have their text, and so have all afterwards."""
    with (tmp_path / "log").open("w") as log, limited(64, log) as (_, address), ExitStack() as open_ones:
        before = ask(address)
        host, port = address.removeprefix("http://").split(":")
        for _ in range(200):
            open_ones.enter_context(socket.create_connection((host, int(port)), timeout=60))

        def try_to_ask(_: int) -> tuple[int, str] | None:
            try:
                return ask(address)
            except httpx.HTTPError:
                return None

        with ThreadPoolExecutor(40) as pool:
            answers = set(pool.map(try_to_ask, range(120)))
        open_ones.close()

        assert before[0] == 200
        assert answers <= {before, (503, "too_many_connections"), None}
        assert [before] * 8 == [ask(address) for _ in range(8)]
        assert 200 == ask(address, GRAMMAR)[0]


def test_no_more_threads(tmp_path: Path) -> None:
    """Their stacks do not fit the address space. Requests that need one are errors; afterwards all is as before."""
    with (tmp_path / "log").open("w") as log, limited(1024, log) as (server, address):
        before, process = ask(address), psutil.Process(server.pid)
        limit = process.rlimit(psutil.RLIMIT_AS)
        process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms + 4 * 2**20, limit[1]))
        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(lambda _: ask(address, GRAMMAR), range(40)))
        process.rlimit(psutil.RLIMIT_AS, limit)
        after = [ask(address) for _ in range(8)]
        expected = ask(address, GRAMMAR)

        assert 200 == expected[0]
        assert set(answers) <= {expected, (500, "internal_error"), (500, "generation_failed")}
        assert [before] * 8 == after
    assert "can't start new thread" in (tmp_path / "log").read_text()
