"""From start to exit code, in a process of its own: readiness, signals, drain, and engines that fail."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.types.status import Stats
from server.hosting import IDLE_CHECKS, Hosting
from server.lifecycle import IDLE_COLLECTION_COUNT, Lifecycle, collect_if_idle, listen
from tests.selection import quick
from tests.server.fakes import FakeEngine, settings
from tests.server.serve_fake import GRACE_OF_STUCK_SECONDS
from tests.server.wire import CHAT, connected, exchange, get, post, read_all, read_until, status

ROOT = Path(__file__).parents[2]
STREAM = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
PATIENCE_SECONDS = 30


@contextmanager
def process(play: str, flag: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server process and its port; killed at the end if it still lives."""
    command = [sys.executable, "-m", "tests.server.serve_fake", play, str(flag)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            yield server, int(server.stdout.readline())
        finally:
            server.kill()


def error_code(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"])


def wait_until_draining(port: int) -> bytes:
    """The answer of /ready once it is not 200 any more; the port stays open meanwhile."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while status(answer := exchange(port, get("/ready", "Connection: close"))) == 200:
        assert time.monotonic() < deadline
    return answer


def wait_until_alive(port: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while status(exchange(port, get("/health", "Connection: close"))) != 200:
        assert time.monotonic() < deadline


@pytest.fixture
def flag(tmp_path: Path) -> Path:
    return tmp_path / "flag"


@pytest.mark.parametrize("number", quick((signal.SIGTERM,), (signal.SIGTERM, signal.SIGINT)))
def test_a_signal_drains_and_exits_with_0(flag: Path, number: signal.Signals) -> None:
    """/ready turns 503 first, new requests get 503 with Retry-After, running streams finish whole, exit code 0."""
    with process("talk", flag) as (server, port), connected(port) as first, connected(port) as second:
        for client in (first, second):
            client.sendall(post(CHAT, STREAM))
            read_until(client, b'"x"')
        server.send_signal(number)
        refused = wait_until_draining(port)
        # uvicorn alone would close the port within its tick of 0.1 s.
        open_until = time.monotonic() + 0.5
        while time.monotonic() < open_until:
            assert 503 == status(exchange(port, get("/ready", "Connection: close")))
        turned_away = exchange(port, post(CHAT, STREAM))
        alive = exchange(port, get("/health", "Connection: close"))
        flag.touch()
        answers = [read_all(first), read_all(second)]

        assert 0 == server.wait(PATIENCE_SECONDS)
    assert "server_draining" == error_code(refused)
    assert 200 == status(alive)
    assert (503, "server_draining") == (status(turned_away), error_code(turned_away))
    retry = re.search(rb"retry-after: (\d+)\r\n", turned_away.lower())
    assert retry is not None
    assert 5 <= int(retry[1]) <= 8
    assert all(b"data: [DONE]\n\n" in answer for answer in answers)


@pytest.mark.slow
def test_a_second_signal_shortens_the_drain(flag: Path) -> None:
    """After two seconds instead of thirty the rest gets an error event, and the exit code is still 0."""
    with process("talk", flag) as (server, port), connected(port) as client:
        client.sendall(post(CHAT, STREAM))
        read_until(client, b'"x"')
        begin = time.monotonic()
        server.send_signal(signal.SIGTERM)
        wait_until_draining(port)
        server.send_signal(signal.SIGTERM)
        rest = read_all(client)

        assert 0 == server.wait(PATIENCE_SECONDS)
    assert time.monotonic() - begin < 15
    assert b'"code":"server_draining"' in rest
    assert b"[DONE]" not in rest


@pytest.mark.slow
def test_a_blocked_send_does_not_delay_the_exit(flag: Path) -> None:
    """Its answer can never be delivered; the process ends all the same."""
    with process("flood", flag) as (server, port), connected(port) as frozen:
        frozen.sendall(post(CHAT, STREAM))
        read_until(frozen, b"xx")
        server.send_signal(signal.SIGTERM)
        wait_until_draining(port)
        server.send_signal(signal.SIGTERM)

        assert 0 == server.wait(PATIENCE_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("play", ["stuck", "stuck worker"])
def test_a_thread_that_never_returns_does_not_keep_the_process(flag: Path, play: str) -> None:
    """The interpreter would wait for it: the request's own thread, and one of asyncio's executor."""
    with process(play, flag) as (server, port), connected(port) as client:
        client.sendall(post(CHAT, STREAM))
        wait_for(flag)
        begin = time.monotonic()
        server.send_signal(signal.SIGTERM)

        assert 0 == server.wait(PATIENCE_SECONDS)
    assert time.monotonic() - begin < GRACE_OF_STUCK_SECONDS + 5


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_idle_server_ends_at_once(flag: Path) -> None:
    """Open connections without a request do not hold it."""
    with process("talk", flag) as (server, port), connected(port) as idle:
        idle.sendall(get("/health"))
        read_until(idle, b"}")
        server.send_signal(signal.SIGTERM)

        assert 0 == server.wait(PATIENCE_SECONDS)


def test_a_server_that_is_loading_ends_in_order(flag: Path) -> None:
    """Calls that load weights cannot be interrupted; the exit code is 0 all the same."""
    with process("load", flag) as (server, port):
        wait_until_alive(port)
        server.send_signal(signal.SIGTERM)

        assert 0 == server.wait(PATIENCE_SECONDS)


def test_an_invalid_model_ends_with_78_and_one_line(flag: Path) -> None:
    """EX_CONFIG, and the reason in words instead of a traceback."""
    with process("gone", flag) as (server, _):
        assert server.stdout is not None

        assert "cellar: cannot find the model 'nowhere': no such folder\n" == server.stdout.read()
        assert 78 == server.wait(PATIENCE_SECONDS)


def test_an_engine_that_dies_ends_the_process(flag: Path) -> None:
    """Streams get their error event, /health its 503, and whoever supervises sees exit code 70."""
    with process("die", flag) as (server, port):
        answer = exchange(port, post(CHAT, STREAM, "Connection: close"))
        health = exchange(port, get("/health", "Connection: close"))

        assert 70 == server.wait(PATIENCE_SECONDS)
    assert b'"code":"engine_dead"' in answer
    assert (503, "engine_dead") == (status(health), error_code(health))


def test_an_address_that_is_taken_is_an_error() -> None:
    """Two servers on one port are a mistake of the user, told as OSError to the command line."""
    with listen("127.0.0.1", 0) as taken, pytest.raises(OSError, match="[Aa]ddress"):
        listen("127.0.0.1", taken.getsockname()[1])


def test_small_packets_go_out_at_once() -> None:
    """asyncio sets TCP_NODELAY on what a socket accepts only if the socket says that it speaks TCP."""
    with listen("127.0.0.1", 0) as listening:
        assert socket.IPPROTO_TCP == listening.proto


def test_all_garbage_is_collected_when_no_request_runs() -> None:
    """And when objects have been created since the last time."""
    gc.collect()
    collect_if_idle([])
    gc.collect(1)
    assert gc.get_count()[2] == 1
    for _ in range(IDLE_COLLECTION_COUNT):
        gc.collect(1)
    collect_if_idle(["request"])
    assert gc.get_count()[2] > IDLE_COLLECTION_COUNT
    collect_if_idle([])
    assert gc.get_count()[2] == 0


def test_ipv6_can_be_listened_on() -> None:
    """The family follows the address."""
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        with listen("::1", 0) as listening:
            assert socket.AF_INET6 == listening.family
    except OSError as error:
        pytest.skip(str(error))


def test_the_exit_codes_differ() -> None:
    """A supervisor can tell them apart."""
    from server import lifecycle, serving
    from server.commands import option_sources

    codes: list[Any] = [option_sources.EXIT_USAGE, serving.EXIT_ADDRESS, lifecycle.EXIT_MODEL, lifecycle.EXIT_ENGINE, 0]
    assert len(codes) == len(set(codes))


def test_grammar_tables_are_built_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part after some checks without running requests."""
    monkeypatch.setattr("server.hosting.IDLE_CHECK_SECONDS", 0)
    idle = [0] * IDLE_CHECKS
    checks = iter([1, *idle[1:], 1, 1, *idle, 0, 1, *idle, *[0] * 1000])
    engine, output, missing = FakeEngine(), list[str](), list[int]()

    def stats() -> Stats:
        missing.append(engine.grammars.missing_parts)
        return Stats(running=next(checks))

    monkeypatch.setattr(engine, "stats", stats)

    assert 0 == run_until(engine, output, lambda: engine.grammars.missing_parts == 0)
    assert [3] * (2 + 2 * IDLE_CHECKS) + [2, 1] + [1] * IDLE_CHECKS == missing
    assert output[0].startswith("Cellar")


def test_a_request_between_two_checks_postpones_grammar_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps are counted, though no check sees it run."""
    monkeypatch.setattr("server.hosting.IDLE_CHECK_SECONDS", 0)
    steps = iter([0, 0, *range(1, 30), *[30] * 1000])
    engine, seen = FakeEngine(), list[tuple[int, int]]()

    def stats() -> Stats:
        seen.append((engine.grammars.missing_parts, number := next(steps)))
        return Stats(steps_total=number)

    monkeypatch.setattr(engine, "stats", stats)

    assert 0 == run_until(engine, [], lambda: engine.grammars.missing_parts == 0)
    assert [(missing, number) for missing, number in seen if number < 30 and missing < 3] == []
    assert (2, 30) in seen


@pytest.mark.parametrize("error", [OSError("no process"), InvalidRequest("grammar", "no end")])
def test_a_failed_preparation_is_logged(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server continues; requests with a grammar get the reason."""
    monkeypatch.setattr("server.hosting.IDLE_CHECK_SECONDS", 0)
    engine = FakeEngine()
    monkeypatch.setattr(engine.grammars, "prepare", lambda: (_ for _ in ()).throw(error))

    assert 0 == run_until(engine, [], lambda: bool(caplog.records))
    assert str(error) in caplog.text


@pytest.mark.parametrize("name", ["_prepare_grammars", "_join"])
def test_a_thread_that_cannot_be_started_ends_no_server(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither when it is idle nor at its end, which is in order."""
    to_thread = asyncio.to_thread

    async def fail_or_run(work: Callable[..., Any], *values: Any) -> Any:
        if getattr(work, "__name__", "") == name:
            raise RuntimeError("can't start new thread")
        return await to_thread(work, *values)

    monkeypatch.setattr("server.hosting.IDLE_CHECK_SECONDS", 0)
    monkeypatch.setattr(asyncio, "to_thread", fail_or_run)
    engine = FakeEngine()

    assert 0 == run_until(engine, [], lambda: bool(caplog.records) or engine.grammars.missing_parts == 0)
    assert "can't start new thread" in caplog.text


def run_until(engine: FakeEngine, output: list[str], done: Callable[[], bool]) -> int:
    """The exit code of a run in this process, which is stopped when something has happened."""
    lifecycle = Lifecycle(Hosting(engine, settings()), settings(), output.append, lambda code: None)  # type: ignore[arg-type]

    async def stop() -> None:
        while not done():
            await asyncio.sleep(0)
        lifecycle.stop()

    async def scene() -> int:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return (await asyncio.gather(lifecycle.run(listen("127.0.0.1", 0)), stop()))[0]

    return asyncio.run(scene())
