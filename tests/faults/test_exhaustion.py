"""A real server without file descriptors or threads: it refuses what it cannot do, and goes on when it can again."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import httpx
import psutil
import pytest

from engine.kernels.cache_folder import _root
from tests.e2e.serving import ROOT, read_address, start_process

pytestmark = pytest.mark.slow

BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0}
# Of no account: the limit counts the processes of a user.
USER = 64321
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
        # Without memory a request may fail elsewhere, too.
        failures = {(503, "threads_exhausted"), (500, "internal_error"), (500, "generation_failed")}
        assert set(answers) <= {expected, *failures}
        assert (503, "threads_exhausted") in answers
        assert [before] * 8 == after
    assert "can't start new thread" in (tmp_path / "log").read_text()


# A server that may start no thread between SIGUSR1 and SIGUSR2.
NO_THREADS = """
import resource, signal
name = resource.RLIMIT_NPROC
soft, hard = resource.getrlimit(name)
signal.signal(signal.SIGUSR1, lambda *_: resource.setrlimit(name, (1, hard)))
signal.signal(signal.SIGUSR2, lambda *_: resource.setrlimit(name, (soft, hard)))
from server.cli import main
main()
"""


@pytest.fixture
def unprivileged() -> Iterator[tuple[list[str], dict[str, str]]]:
    """The begin of a command that runs as a user whom RLIMIT_NPROC binds, and the variables of its folders."""
    if os.geteuid():
        yield [], {}
        return
    if not shutil.which("setpriv"):
        pytest.skip("needs setpriv, as the limit does not bind root")
    with tempfile.TemporaryDirectory() as folder:
        kernels = _root() / "kernels"
        if kernels.exists():
            shutil.copytree(kernels, Path(folder, kernels.parent.name, kernels.name))
        for path in (Path(folder), *Path(folder).rglob("*")):
            os.chown(path, USER, USER)
        # The interpreter and its packages may be in root's home folder.
        command = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
        command += ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
        if subprocess.run([*command, sys.executable, "-c", ""], check=False).returncode:
            pytest.skip("another user cannot run this interpreter")
        yield command, {"XDG_CACHE_HOME": folder, "HOME": folder}


def test_no_more_threads_for_the_user(tmp_path: Path, unprivileged: tuple[list[str], dict[str, str]]) -> None:
    """All that need one are a 503 in the API's shape, until threads can be started again; then all are answered."""
    prefix, variables = unprivileged
    options = ["serve", "--port", "0", "--context", "1024", "--threads", "1", "--store", "memory"]
    with (
        (tmp_path / "log").open("w") as log,
        start_process([*prefix, sys.executable, "-c", NO_THREADS, *options], log, variables) as server,
    ):
        try:
            address = read_address(server)
            server.send_signal(signal.SIGUSR1)
            # The handler of the signal runs within an iteration of the event loop.
            httpx.get(f"{address}/health", timeout=60)
            time.sleep(1.5)
            with ThreadPoolExecutor(40) as pool:
                answers = list(pool.map(lambda _: ask(address, GRAMMAR), range(40)))
            refused = httpx.post(f"{address}/v1/responses", json={"input": "Hello"}, timeout=60)
            server.send_signal(signal.SIGUSR2)
            time.sleep(1.5)
            after = ask(address, GRAMMAR)
        finally:
            server.terminate()
            code = server.wait(60)

    assert set(answers) == {(503, "threads_exhausted")}
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "threads_exhausted")
    assert 5 <= int(refused.headers["retry-after"]) <= 8
    assert after[0] == 200
    assert code == 0
