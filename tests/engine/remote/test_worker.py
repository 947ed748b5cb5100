"""Worker processes that die, hang or send garbage, and front ends that die: each ends the other side's part only."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from engine.config import EngineConfig
from engine.errors import ContextTooLong, EngineDead, InvalidRequest, ModelMissing, Overloaded
from engine.output.stream import UNREAD_EVENTS
from engine.remote import messages
from engine.remote.connection import MAX_MESSAGE_BYTES, frame
from engine.remote.engine import RemoteEngine
from engine.remote.process import Launch, StartedProcess
from engine.remote.zygote import Zygote
from engine.types.events import Delta, Event, Failed, Started
from engine.types.request import Grammar, Request
from tests.engine.kit.models import CONTEXT
from tests.engine.kit.play import ask

Story = Callable[[RemoteEngine], Awaitable[None]]


@pytest.fixture
def config(folder: Callable[[str], Path]) -> EngineConfig:
    """A tiny model."""
    return EngineConfig(model=str(folder("llama")), context=CONTEXT, slots=2, dtype="float64")


def run(config: EngineConfig, launch: Launch, story: Story, *, stuck_seconds: float = 60.0) -> None:
    """Run a coroutine with a loaded engine; afterwards its process has ended."""

    async def scene() -> None:
        engine = RemoteEngine(config, launch=launch, stuck_seconds=stuck_seconds)
        engine.start()
        try:
            async with asyncio.timeout(90):
                await engine.wait_ready()
                await story(engine)
        finally:
            await asyncio.to_thread(engine.close)
        assert engine.pid is not None
        assert not is_running(engine.pid)

    asyncio.run(scene())


def is_running(pid: int) -> bool:
    """Whether a process exists, and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def answer(engine: RemoteEngine, request: Request) -> list[Event]:
    async with engine.open(request) as stream:
        return [event async for event in stream]


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.tokens]


def request(name: str, count: int = 5) -> Request:
    return ask(name, range(1, 6), count, ignore_eos=True)


def endless(name: str) -> Request:
    """A request that ends with its stream: contexts are shifted."""
    return ask(name, range(1, 6), 10**6, ignore_eos=True, overflow="shift")


def test_a_started_worker_and_a_forked_one_answer_alike(config: EngineConfig, zygote: Zygote) -> None:
    """Also text that is tokenized there, and concurrent requests."""
    results = []

    async def story(engine: RemoteEngine) -> None:
        answers = await asyncio.gather(*(answer(engine, request(str(number))) for number in range(5)))
        text = await asyncio.to_thread(engine.tokenizer.decode, tokens(answers[0]))
        results.append(([tokens(events) for events in answers], text))

    run(config, StartedProcess, story)
    run(config, zygote.launch, story)
    assert results[0] == results[1]
    assert len({tuple(line) for line in results[0][0]}) == 1
    assert len(results[0][0][0]) == 5


def test_the_front_end_has_no_torch() -> None:
    code = (
        "import sys, engine.remote.engine, engine.remote.zygote;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'tokenizers')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_worker_ends_its_streams(config: EngineConfig, zygote: Zygote, number: signal.Signals) -> None:
    """Not those of another worker; calls and snapshots fail with EngineDead, and a new worker answers the same."""

    async def story(engine: RemoteEngine) -> None:
        other = RemoteEngine(config, launch=zygote.launch)
        other.start()
        await other.wait_ready()
        expected = tokens(await answer(other, request("before")))
        async with engine.open(endless("a")) as stream, other.open(endless("b")) as unharmed:
            assert isinstance(await anext(aiter(stream)), Started)
            assert engine.pid is not None
            os.kill(engine.pid, number)
            rest = [event async for event in stream]
            assert isinstance(rest[-1], Failed)
            await engine.wait_dead()
            assert engine.phase == f"dead: the worker process was ended by {number.name}"
            assert not engine.ready
            for _ in range(3):
                assert not isinstance(await anext(aiter(unharmed)), Failed)
        with pytest.raises(EngineDead):
            await engine.snapshot("", b"")
        with pytest.raises(EngineDead):
            await answer(engine, request("c"))
        assert tokens(await answer(other, request("after"))) == expected
        await asyncio.to_thread(other.close)

    run(config, zygote.launch, story)


def test_calls_that_wait_fail_with_the_worker(config: EngineConfig, zygote: Zygote) -> None:
    async def story(engine: RemoteEngine) -> None:
        tokenizer = engine.tokenizer
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        calls = [asyncio.create_task(asyncio.to_thread(tokenizer.encode, "a")) for _ in range(3)]
        await asyncio.sleep(0.1)
        engine.kill()
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, EngineDead)

    run(config, zygote.launch, story)


def test_a_stopped_worker_is_killed(config: EngineConfig, zygote: Zygote) -> None:
    async def story(engine: RemoteEngine) -> None:
        async with engine.open(endless("a")) as stream:
            assert isinstance(await anext(aiter(stream)), Started)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGSTOP)
            async with asyncio.timeout(30):
                events = [event async for event in stream]
        assert isinstance(events[-1], Failed)
        assert engine.phase == "dead: the worker process makes no progress"
        await wait_until(lambda: engine.pid is not None and not is_running(engine.pid))

    run(config, zygote.launch, story, stuck_seconds=3.0)


def test_an_idle_worker_is_not_stuck(config: EngineConfig, zygote: Zygote) -> None:
    """Its signs of life arrive without any request."""

    async def story(engine: RemoteEngine) -> None:
        await asyncio.sleep(5.0)
        assert engine.alive

    run(config, zygote.launch, story, stuck_seconds=4.0)


def test_a_stream_that_is_left_unread_is_bounded(config: EngineConfig, zygote: Zygote) -> None:
    """Events stay in the worker, where the engine sees that they are unread; the reader then gets all of them."""

    long = ask("long", range(1, 6), 400, ignore_eos=True, overflow="shift")

    async def story(engine: RemoteEngine) -> None:
        expected = tokens(await answer(engine, long))
        async with engine.open(long) as stream:
            queued = stream._events
            await wait_until(lambda: len(queued) >= UNREAD_EVENTS)
            # Another request gets all of the steps meanwhile.
            await answer(engine, ask("other", range(1, 6), 400, ignore_eos=True, overflow="shift"))
            assert len(queued) < 4 * UNREAD_EVENTS
            events = [event async for event in stream]
        assert tokens(events) == expected
        assert len(expected) == 400

    run(config, zygote.launch, story)


def test_refusals_arrive_as_they_were_raised(config: EngineConfig, zygote: Zygote) -> None:
    async def story(engine: RemoteEngine) -> None:
        with pytest.raises(ContextTooLong) as too_long:
            await answer(engine, ask("a", range(1, 2 * CONTEXT), 1))
        assert too_long.value.capacity == CONTEXT
        with pytest.raises(InvalidRequest) as refused:
            await answer(engine, ask("b", [10**9], 1))
        assert "token" in str(refused.value)
        with pytest.raises(InvalidRequest):
            await answer(engine, ask("c", [10**30], 1))
        with pytest.raises(InvalidRequest):
            await answer(engine, ask("d", [1], 1, stop=("\ud800",)))
        with pytest.raises(InvalidRequest):
            await answer(engine, ask("e", [1], 1, grammar=Grammar("no grammar [")))
        with pytest.raises(InvalidRequest, match="surrogate"):
            await asyncio.to_thread(engine.tokenizer.encode, "half \ud800")
        with pytest.raises(InvalidRequest):
            await asyncio.to_thread(engine.tokenizer.describe_tokens, [-1])
        with pytest.raises(RuntimeError, match="event loop"):
            engine.tokenizer.encode("a")
        assert len(tokens(await answer(engine, request("f")))) == 5

    run(config, zygote.launch, story)


def test_a_full_queue_refuses_at_once(config: EngineConfig, zygote: Zygote) -> None:
    async def story(engine: RemoteEngine) -> None:
        async with engine.open(endless("a")), engine.open(endless("b")), engine.open(endless("c")):
            with pytest.raises(Overloaded):
                engine.check_admission("")
            with pytest.raises(Overloaded):
                await answer(engine, request("d"))

    full = EngineConfig(model=config.model, context=CONTEXT, slots=2, dtype="float64", max_waiting=1)
    run(full, zygote.launch, story)


def test_an_id_returns_after_its_request_was_left(config: EngineConfig, zygote: Zygote) -> None:
    async def story(engine: RemoteEngine) -> None:
        for _ in range(5):
            async with engine.open(endless("same")) as stream:
                assert isinstance(await anext(aiter(stream)), Started)
                with pytest.raises(InvalidRequest, match="is running"):
                    await answer(engine, request("same"))
        assert len(tokens(await answer(engine, request("same")))) == 5

    run(config, zygote.launch, story)


def test_a_load_that_fails_raises_its_error_and_ends_the_process(tmp_path: Path, zygote: Zygote) -> None:
    async def story() -> None:
        phases: list[str] = []
        engine = RemoteEngine(EngineConfig(model=str(tmp_path / "missing")), phases.append, launch=zygote.launch)
        engine.start()
        with pytest.raises(ModelMissing) as missing:
            await asyncio.wait_for(engine.wait_ready(), 60)
        assert missing.value.model == str(tmp_path / "missing")
        assert phases
        assert not engine.alive
        await wait_until(lambda: engine.pid is not None and not is_running(engine.pid))
        await asyncio.to_thread(engine.close)

    asyncio.run(story())


def test_a_program_that_cannot_be_started_is_a_dead_engine(config: EngineConfig) -> None:
    def launch() -> StartedProcess:
        raise OSError("no memory")

    async def story() -> None:
        engine = RemoteEngine(config, launch=launch)
        engine.start()
        with pytest.raises(EngineDead, match="no memory"):
            await engine.wait_ready()
        engine.close()

    asyncio.run(story())


class Impostor:
    """A worker process that is a thread: it answers the first message with bytes, and waits for the end."""

    pid = os.getpid()

    def __init__(self, data: bytes, *, ends: bool) -> None:
        self.socket, self._far = socket.socketpair()
        self._data, self._ends, self.killed = data, ends, threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with self._far:
            self._far.recv(1)
            self._far.sendall(self._data)
            if self._ends:
                self._far.shutdown(socket.SHUT_WR)
            while self._far.recv(65536):
                pass
        self._ended.set()

    def kill(self) -> None:
        self.killed.set()

    def wait(self, seconds: float | None = None) -> int | None:
        return 1 if self._ended.wait(seconds) else None


NO_MODEL = messages.encode(messages.LoadPhase("weights"))


@pytest.mark.parametrize(
    ("data", "ends", "reason"),
    [
        (frame(b"garbage"), False, "sent no"),
        (frame(NO_MODEL[4:-1]), False, "sent no"),
        (struct.pack("!I", MAX_MESSAGE_BYTES + 1), False, "exceeds the limit"),
        (messages.encode(messages.Refused(1, messages.ErrorMessage("SystemExit", {}))), False, "sent no error"),
        (messages.encode(messages.Ended(messages.ErrorMessage("Exception", {}))), False, "sent no error"),
        (NO_MODEL + NO_MODEL[:7], True, "ended with code 1"),
        (b"", True, "ended with code 1"),
    ],
)
def test_garbage_and_half_a_message_are_the_end_of_a_worker(
    config: EngineConfig, data: bytes, ends: bool, reason: str
) -> None:
    impostor = Impostor(data, ends=ends)

    async def story() -> None:
        engine = RemoteEngine(config, launch=lambda: impostor)
        engine.start()
        with pytest.raises(EngineDead, match=reason):
            await asyncio.wait_for(engine.wait_ready(), 20)
        assert impostor.killed.is_set()
        assert not engine.ready
        await asyncio.to_thread(engine.close)

    asyncio.run(story())


@contextmanager
def bare_worker(launch: Launch) -> Iterator[tuple[socket.socket, Callable[[float], int | None]]]:
    """A worker without a front end: its socket, and the wait for its end."""
    process = launch()
    process.socket.settimeout(60)
    try:
        yield process.socket, process.wait
    finally:
        process.kill()
        process.socket.close()
        process.wait()


@pytest.mark.parametrize(
    "data",
    [
        frame(b"garbage"),
        struct.pack("!I", MAX_MESSAGE_BYTES + 1),
        messages.encode(messages.CancelStream(1)),
        messages.encode(messages.Ended(messages.ErrorMessage("Exception", {}))),
    ],
)
def test_a_worker_ends_at_garbage(zygote: Zygote, data: bytes) -> None:
    with bare_worker(zygote.launch) as (connected, wait):
        connected.sendall(data)
        assert connected.recv(1) == b""
        assert wait(30.0) == 1


@pytest.mark.parametrize("sent", [b"", b"\x00\x00"])
def test_a_worker_ends_with_the_socket(config: EngineConfig, zygote: Zygote, sent: bytes) -> None:
    """Before the load, and in the middle of a message during the load."""
    with bare_worker(zygote.launch) as (connected, wait):
        if sent:
            connected.sendall(messages.encode(messages.LoadModel(config)))
            connected.recv(1)
            connected.sendall(sent)
        connected.shutdown(socket.SHUT_RDWR)
        assert wait(30.0) == 0


FRONT_END = """
import asyncio, sys
from engine.config import EngineConfig
from engine.remote.engine import RemoteEngine
from engine.remote.zygote import Zygote
async def main():
    zygote = Zygote()
    engines = [RemoteEngine(EngineConfig(model=sys.argv[1], context=64, slots=2), launch=zygote.launch) for _ in "ab"]
    for engine in engines:
        engine.start()
    for engine in engines:
        await engine.wait_ready()
    print(zygote.pid, *(engine.pid for engine in engines), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.slow  # a worker that hangs is the harder case
def test_workers_and_zygote_end_with_a_front_end_that_is_killed(config: EngineConfig) -> None:
    front_end = subprocess.Popen([sys.executable, "-c", FRONT_END, str(config.model)], stdout=subprocess.PIPE)
    with front_end:
        assert front_end.stdout is not None
        pids = [int(word) for word in front_end.stdout.readline().split()]
        assert len(pids) == 3
        assert all(map(is_running, pids))
        front_end.kill()
        asyncio.run(wait_until(lambda: not any(map(is_running, pids))))


def test_a_worker_that_hangs_ends_with_the_front_end(config: EngineConfig) -> None:
    front_end = subprocess.Popen([sys.executable, "-c", FRONT_END, str(config.model)], stdout=subprocess.PIPE)
    with front_end:
        assert front_end.stdout is not None
        pids = [int(word) for word in front_end.stdout.readline().split()]
        os.kill(pids[-1], signal.SIGSTOP)
        front_end.kill()
        asyncio.run(wait_until(lambda: not any(map(is_running, pids))))


def test_a_dead_zygote_is_replaced_and_its_workers_continue(config: EngineConfig, zygote: Zygote) -> None:
    async def story(engine: RemoteEngine) -> None:
        expected = tokens(await answer(engine, request("a")))
        assert zygote.pid is not None
        before = zygote.pid
        os.kill(before, signal.SIGKILL)
        await wait_until(lambda: not is_running(before))
        assert tokens(await answer(engine, request("b"))) == expected
        second = RemoteEngine(config, launch=zygote.launch)
        second.start()
        await second.wait_ready()
        assert zygote.pid != before
        assert tokens(await answer(second, request("c"))) == expected
        # Its exit code is lost with the zygote, its end is not.
        engine.kill()
        await engine.wait_dead()
        await asyncio.to_thread(second.close)

    run(config, zygote.launch, story)


def test_workers_of_a_zygote_have_their_own_random_numbers(config: EngineConfig, zygote: Zygote) -> None:
    seeds = []

    async def story(engine: RemoteEngine) -> None:
        [started, *_] = await answer(engine, request("a"))
        assert isinstance(started, Started)
        seeds.append(started.seed)

    for _ in range(2):
        run(config, zygote.launch, story)
    assert seeds[0] != seeds[1]


def test_the_memory_of_a_worker_is_counted(config: EngineConfig, zygote: Zygote) -> None:
    async def story(engine: RemoteEngine) -> None:
        size = await asyncio.to_thread(engine.private_bytes)
        assert 2**20 < size < 2**31
        engine.kill()
        await engine.wait_dead()
        assert await asyncio.to_thread(engine.private_bytes) == 0

    run(config, zygote.launch, story)
