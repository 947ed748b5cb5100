"""A server of two ranks: the end of one ends the other, and is an exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from server.lifecycle import EXIT_ENGINE
from tests.e2e.serving import ROOT, read_address
from tests.engine.kit.models import save_model

SERVE = [sys.executable, "-c", "from server.cli import main; main()", "serve", "--port", "0", "--store", "none"]
# The promise is 10 seconds; a busy machine is slow to start the exit, not to notice.
EXIT_SECONDS = 10
WORKER_SECONDS = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("ranks") / "llama")


@contextmanager
def two_ranks(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A server process that has just been started; killed at the end if it still lives."""
    command = [*SERVE, str(folder), "--tensor-parallel", "2", "--threads", "2", "--overflow", "shift"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            yield server
        finally:
            server.kill()


def worker_of(server: subprocess.Popen[str]) -> psutil.Process:
    """The process of rank 1, once it has been started."""
    deadline = time.monotonic() + WORKER_SECONDS
    while time.monotonic() < deadline:
        for child in psutil.Process(server.pid).children():
            with suppress(psutil.Error):
                if "engine.parallel.worker" in child.cmdline():
                    return child
    raise AssertionError("no worker was started")


def complete(address: str, **fields: object) -> Iterator[bytes]:
    """The lines of the answer to a completion."""
    body = json.dumps({"prompt": "the", "max_tokens": 8, "ignore_eos": True, "temperature": 0, **fields})
    request = urllib.request.Request(f"{address}/v1/completions", body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        yield from answer


def wait_for_exit(server: subprocess.Popen[str]) -> tuple[int, float, str]:
    """Exit code, the seconds until then, and the output."""
    began = time.monotonic()
    output, _ = server.communicate(timeout=60)
    return server.returncode, time.monotonic() - began, output


def wait_for_orphan(process: psutil.Process) -> None:
    """Wait for the end of a process; as an orphan it stays a zombie until process 1 reaps it, when that has time."""
    deadline = time.monotonic() + EXIT_SECONDS
    with suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the worker is alive"
            time.sleep(0.05)


def listening_addresses(process: psutil.Process) -> set[str]:
    """The addresses at which a process accepts connections."""
    return {each.laddr.ip for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN}


@pytest.mark.slow
def test_a_dead_rank_ends_the_server(folder: Path) -> None:
    """Under a stream, which ends with an error event; with exit code 70, soon."""
    with two_ranks(folder) as server:
        address = read_address(server)
        worker = worker_of(server)
        assert b"text" in b"".join(complete(address))
        assert {"127.0.0.1"} == listening_addresses(worker) | listening_addresses(psutil.Process(server.pid))

        stream = complete(address, stream=True, max_tokens=100_000)
        assert next(stream).startswith(b"data:")
        worker.kill()
        events = b"".join(stream)
        code, seconds, output = wait_for_exit(server)

    assert EXIT_ENGINE == code
    assert seconds < EXIT_SECONDS
    assert b'"error"' in events
    assert "the process of rank 1 ended with code -9" in output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_rank_0(folder: Path, number: signal.Signals) -> None:
    """Killed, or after its drain with code 0."""
    with two_ranks(folder) as server:
        read_address(server)
        worker = worker_of(server)
        os.kill(server.pid, number)
        code, _, _ = wait_for_exit(server)
        wait_for_orphan(worker)

    assert (0 if number == signal.SIGTERM else -number) == code


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 3, 5])
def test_a_rank_that_dies_at_load_ends_the_server(folder: Path, seconds: float) -> None:
    """Before it joins, or while it loads; the server never waits for it."""
    with two_ranks(folder) as server:
        worker = worker_of(server)
        time.sleep(seconds)
        worker.kill()
        code, took, output = wait_for_exit(server)

    assert EXIT_ENGINE == code, output
    assert took < EXIT_SECONDS
    assert "the process of rank 1 ended with code -9" in output


@pytest.mark.slow
def test_refusals_are_shown(folder: Path) -> None:
    """One line, and the exit code of a model or setting that cannot be served."""
    shown = [
        subprocess.run([*SERVE, str(folder), *flags], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        for flags in (["--tensor-parallel", "4"], ["--tensor-parallel", "2", "--quantize", "int8"])
    ]

    assert [78, 2] == [each.returncode for each in shown]
    assert "it has 2 KV heads, not divisible by 4" in shown[0].stdout
    assert "--quantize int8 is not supported with --tensor-parallel 2" in shown[1].stdout
