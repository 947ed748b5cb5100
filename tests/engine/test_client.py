"""The contract of EngineClient: what any engine behind the server does. Engine and the fake of tests/server pass it."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from engine import client
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ContextTooLong, Draining, Loading, ModelMissing
from engine.remote.engine import RemoteEngine
from engine.remote.zygote import Zygote
from engine.types.events import Delta, Event, Failed, Finished, Started
from engine.types.request import Request
from engine.types.snapshot import EngineSnapshot
from tests.engine.kit.models import CONTEXT
from tests.engine.kit.play import ask
from tests.server.fakes import INFO, FakeEngine, Gate, speak

Running = Callable[[], AbstractAsyncContextManager[EngineClient]]
ENDLESS = 40


@pytest.fixture(params=["engine", "remote", "fake"])
def running(request: pytest.FixtureRequest, folder: Callable[[str], Path], zygote: Zygote) -> Running:
    """An implementation, ready, whose requests of ENDLESS tokens do not end by themselves soon."""

    @asynccontextmanager
    async def start() -> AsyncIterator[EngineClient]:
        engine: EngineClient
        if request.param == "fake":
            engine = FakeEngine(script=_paused_if_endless)  # type: ignore[assignment]
        else:
            config = EngineConfig(model=str(folder("llama")), context=CONTEXT, slots=2, dtype="float64")
            engine = Engine(config) if request.param == "engine" else RemoteEngine(config, launch=zygote.launch)
        engine.start()
        try:
            await engine.wait_ready()
            yield engine
        finally:
            await asyncio.to_thread(engine.close)

    return start


def _paused_if_endless(request: Request) -> list[Event | Gate]:
    started, *events = speak(request)
    return [started, *([Gate()] if request.max_tokens == ENDLESS else []), *events]


def check(running: Running, story: Callable[[EngineClient], Awaitable[None]]) -> None:
    """Run a coroutine with an engine, for half a minute at most."""

    async def scene() -> None:
        async with asyncio.timeout(30), running() as engine:
            await story(engine)

    asyncio.run(scene())


def request(name: str = "one", count: int = 3, length: int = 5) -> Request:
    """A greedy request that ends at its length."""
    return ask(name, range(1, length + 1), count, ignore_eos=True)


@pytest.mark.parametrize(
    ("protocol", "part"),
    [
        (client.EngineClient, ""),
        (client.TokenizerClient, "tokenizer"),
        (client.GrammarClient, "grammars"),
    ],
)
def test_members_and_parameters_are_those_of_the_protocol(running: Running, protocol: type, part: str) -> None:
    """Of the engine and of its parts: names, and the names of the parameters of each method."""

    async def story(engine: EngineClient) -> None:
        subject = getattr(engine, part) if part else engine
        members = {name for name in (*vars(protocol), *protocol.__annotations__) if not name.startswith("_")}
        assert members
        for name in members:
            assert name in dir(subject)
            expected = inspect.getattr_static(protocol, name, None)
            if inspect.isfunction(expected):
                declared = [each for each in inspect.signature(expected).parameters if each != "self"]
                taken = inspect.signature(getattr(subject, name)).parameters
                free = any(each.kind is each.VAR_KEYWORD for each in taken.values())
                assert free or declared == list(taken), name

    check(running, story)


def test_a_request_starts_has_deltas_and_one_end(running: Running) -> None:
    async def story(engine: EngineClient) -> None:
        async with engine.open(request()) as stream:
            events = [event async for event in stream]
        assert isinstance(events[0], Started)
        assert isinstance(events[-1], Finished)
        assert all(isinstance(event, Delta) for event in events[1:-1])
        tokens = [token for event in events if isinstance(event, Delta) for token in event.tokens]
        assert len(tokens) == events[-1].usage.completion_tokens == 3

    check(running, story)


def test_leaving_the_block_cancels(running: Running) -> None:
    """More requests than there are slots, each left at its start; then another one is answered."""

    async def story(engine: EngineClient) -> None:
        for name in ("a", "b", "c"):
            async with engine.open(request(name, ENDLESS)) as stream:
                assert isinstance(await anext(aiter(stream)), Started)
        async with engine.open(request()) as stream:
            assert isinstance([event async for event in stream][-1], Finished)

    check(running, story)


def test_a_delta_goes_to_the_fast_path_or_to_the_reader(running: Running) -> None:
    """Never to both, and none is lost; which of them depends on whether the reader waits."""

    async def story(engine: EngineClient) -> None:
        taken: list[Delta] = []
        async with engine.open(request()) as stream:
            stream.fast_path = lambda delta: taken.append(delta) is None
            events = [event async for event in stream]
        read = [event for event in events if isinstance(event, Delta)]
        assert isinstance(events[-1], Finished)
        assert sum(len(delta.tokens) for delta in (*taken, *read)) == 3

    check(running, story)


def test_a_prompt_that_is_too_long_is_refused_on_opening(running: Running) -> None:
    async def story(engine: EngineClient) -> None:
        with pytest.raises(ContextTooLong):
            async with engine.open(request(length=engine.info.context + 1)):
                pass

    check(running, story)


def test_draining_refuses_requests_and_ends_running_ones(running: Running) -> None:
    async def story(engine: EngineClient) -> None:
        async with engine.open(request(count=ENDLESS)) as stream:
            assert isinstance(await anext(aiter(stream)), Started)
            draining = asyncio.create_task(engine.drain(0.0))
            rest = [event async for event in stream]
            await draining
        assert isinstance(rest[-1], Failed)
        assert (engine.phase, engine.ready, engine.alive) == ("draining", False, True)
        with pytest.raises(Draining):
            async with engine.open(request("two")):
                pass

    check(running, story)


def test_state_can_cross_the_border_of_a_process(running: Running) -> None:
    """Information, plans, statistics, snapshots and events are values without references into the engine."""

    async def story(engine: EngineClient) -> None:
        async with engine.open(request()) as stream:
            events = [event async for event in stream]
        snapshot = await engine.snapshot("", b"")
        assert isinstance(snapshot, EngineSnapshot)
        values = (engine.info, engine.memory, engine.drafting, engine.embedding, engine.stats(), snapshot, *events)
        for value in values:
            assert value == pickle.loads(pickle.dumps(value))
        engine.check_admission("")

    check(running, story)


def test_before_the_load_there_is_no_model(folder: Callable[[str], Path]) -> None:
    """Neither implementation describes one, nor is it ready; both are alive after their start."""
    engine = Engine(EngineConfig(model=str(folder("llama")), context=CONTEXT, slots=2))
    fake = FakeEngine(phase="weights", info_value=INFO)
    for each in (engine, fake):
        assert not each.ready
        with pytest.raises(Loading):
            _ = each.info


def test_a_failed_load_is_raised(tmp_path: Path) -> None:
    async def story() -> None:
        engine = Engine(EngineConfig(model=str(tmp_path / "missing"), context=CONTEXT, slots=2))
        for each in (engine, FakeEngine(failure=ModelMissing("missing", "missing"))):
            each.start()
            with pytest.raises(ModelMissing):
                await each.wait_ready()
            await asyncio.to_thread(each.close)

    asyncio.run(story())
