"""Exhaustion of file descriptors: by connections, which are limited, and by other parts of the process."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from server.http.descriptors import RESERVED_DESCRIPTORS, connection_limit
from tests.server.wire import connected, exchange, get, read_until, status

ROOT = Path(__file__).parents[3]
DESCRIPTORS = 200
PATIENCE_SECONDS = 30


@contextmanager
def process(play: str, flag: Path, log: Path) -> Iterator[int]:
    """A server process with a low limit of descriptors, and its port."""
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "tests.server.serve_fake", play, str(flag)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)),
        ) as server,
    ):
        try:
            assert server.stdout is not None
            yield int(server.stdout.readline())
        finally:
            server.kill()


def answers(port: int) -> int:
    """The status of /health."""
    return status(exchange(port, get("/health", "Connection: close")))


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_health_is_answered_at_the_connection_limit(tmp_path: Path) -> None:
    """With more idle connections than descriptors the longest idle ones are closed, and nothing is logged."""
    log = tmp_path / "log"
    with process("talk", tmp_path / "flag", log) as port, ExitStack() as open_ones:
        found = [answers(port)]
        for _ in range(3):
            for _ in range(DESCRIPTORS):
                open_ones.enter_context(socket.create_connection(("127.0.0.1", port)))
            found.append(answers(port))

        assert [200] * 4 == found
    assert "" == log.read_text()


def test_exhausted_descriptors_are_logged_and_survived(tmp_path: Path) -> None:
    """One line a second without a traceback; with free descriptors the queued connections are served."""
    flag, log = tmp_path / "flag", tmp_path / "log"
    with process("eat", flag, log) as port:
        assert 200 == answers(port)
        flag.touch()
        wait_for(flag.with_suffix(".eaten"))
        begun = time.monotonic()
        with ExitStack() as stack:
            clients = [stack.enter_context(connected(port)) for _ in range(20)]
            for client in clients:
                client.sendall(get("/health"))
            while len(log.read_text().splitlines()) < 3:
                assert time.monotonic() - begun < PATIENCE_SECONDS
                time.sleep(0.05)
            seconds = time.monotonic() - begun
            flag.unlink()
            served = [status(read_until(client, b"}")) for client in clients]

        lines = log.read_text().splitlines()
        assert [200] * 20 == served
        assert {"no connection can be accepted, next attempt in a second: Too many open files"} == {*lines}
        # The first line at once, one more after each second.
        assert len(lines) <= 3 + seconds + 2


@pytest.mark.parametrize(("soft", "hard"), [(256, 256), (64, 64), (300, 100_000)])
def test_connections_leave_a_reserve_of_descriptors(soft: int, hard: int) -> None:
    """A reserve, or half of few descriptors; a higher hard limit allows all connections."""
    code = (
        "import resource as r; from server.http.descriptors import connection_limit;"
        f"r.setrlimit(r.RLIMIT_NOFILE, ({soft}, min({hard}, r.getrlimit(r.RLIMIT_NOFILE)[1])));"
        "print(connection_limit(500), r.getrlimit(r.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    connections, limit = map(int, done.stdout.split())

    assert connections == min(500, max(limit - RESERVED_DESCRIPTORS, limit // 2))
    assert limit == (soft if hard == soft else 500 + RESERVED_DESCRIPTORS)
    assert connection_limit(1) == 1
