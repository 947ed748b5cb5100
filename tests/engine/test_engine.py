"""The boundary between the event loop and the engine thread: the only tests with a real engine thread."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.core import Core
from engine.engine import Engine
from engine.errors import (
    ContextTooLong,
    Draining,
    EngineDead,
    InvalidRequest,
    Loading,
    ModelMissing,
    Overloaded,
    TimeoutTooShort,
)
from engine.schedule.sequence import Sequence
from engine.schedule.wait_predictor import WaitPredictor
from engine.types.events import Delta, Event, Failed, Finished, Started
from engine.types.request import Request, SamplingParams
from engine.types.snapshot import EngineSnapshot
from engine.types.status import DraftingInfo, Stats
from tests.engine.kit.models import CONTEXT, END, VOCABULARY, Reference
from tests.engine.kit.play import ask
from tests.engine.kit.served_contents import token_contents

Folder = Callable[[str], Path]
ENDLESS = 100
EMPTY_SNAPSHOT = EngineSnapshot(Stats(), 0.0, CONTEXT, (), (), (), ())


@asynccontextmanager
async def running(folder: Path, **settings: object) -> AsyncIterator[Engine]:
    """A ready engine, closed at the end."""
    config = {"context": CONTEXT, "slots": 2, "dtype": "float64", **settings}
    engine = Engine(EngineConfig(model=str(folder), **config))
    engine.start()
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await asyncio.to_thread(engine.close)


def run_with_engine(folder: Path, story: Callable[[Engine], Awaitable[None]], **settings: object) -> None:
    """Run a coroutine with an engine, for half a minute at most."""

    async def scene() -> None:
        async with asyncio.timeout(30), running(folder, **settings) as engine:
            await story(engine)

    asyncio.run(scene())


async def answer(engine: Engine, request: Request) -> list[Event]:
    """All events of a request."""
    async with engine.open(request) as stream:
        return [event async for event in stream]


def tokens(events: list[Event]) -> list[int]:
    """The tokens of an answer."""
    return [token for event in events if isinstance(event, Delta) for token in event.tokens]


def test_output_equals_generate(folder: Folder, reference: Callable[..., Reference]) -> None:
    """Five concurrent clients get Started, deltas and Finished."""
    prompts = [(5, 6, 7), (5, 6, 7, 8), (9,), (1, 2, 3, 4, 5), (5, 6)]

    async def story(engine: Engine) -> None:
        asked = (answer(engine, ask(str(at), prompt, 12)) for at, prompt in enumerate(prompts))
        for prompt, events in zip(prompts, await asyncio.gather(*asked), strict=True):
            expected = reference("llama").greedy(prompt, 12)

            assert isinstance(events[0], Started)
            assert isinstance(events[-1], Finished)
            assert [token for token in expected if token != END] == tokens(events)

    run_with_engine(folder("llama"), story)


def test_leaving_open_cancels(folder: Folder) -> None:
    """The next client gets the slot."""

    async def story(engine: Engine) -> None:
        async with engine.open(ask("leaves", (1, 2, 3), ENDLESS, ignore_eos=True)) as stream:
            await anext(stream)
        events = await answer(engine, ask("next", (1, 2), 3, ignore_eos=True))

        assert 3 == len(tokens(events))
        assert engine.stats().generated_tokens_total < ENDLESS

    run_with_engine(folder("llama"), story, slots=1)


def test_stats_count_a_cancelled_request(folder: Folder) -> None:
    """Soon after the last client left, no request is running."""

    async def story(engine: Engine) -> None:
        async with engine.open(ask("leaves", (1, 2, 3), 100_000, ignore_eos=True, overflow="shift")) as stream:
            await anext(stream)
            while not engine.stats().running:
                await anext(stream)
        async with asyncio.timeout(3):
            while engine.stats().running:
                await asyncio.sleep(0)

    run_with_engine(folder("llama"), story)


def test_events_of_a_cancelled_request_do_not_reach_a_later_one_with_its_id(folder: Folder) -> None:
    """They are on their way to the event loop when its id is used again."""

    async def story(engine: Engine) -> None:
        async with engine.open(ask("one", (1, 2, 3), ENDLESS)):
            steps = engine._watchdog._steps
            while engine._watchdog._steps < steps + 3:
                # Without an await: the event loop delivers nothing meanwhile.
                time.sleep(0.001)
        events = await answer(engine, ask("one", (4, 5), 2))

        assert isinstance(events[0], Started)
        assert events[0].prompt_tokens == 2
        assert tokens(events) == tokens(await answer(engine, ask("two", (4, 5), 2)))

    run_with_engine(folder("llama"), story)


def test_an_exception_inside_open_cancels(folder: Folder) -> None:

    async def fail(engine: Engine) -> None:
        async with engine.open(ask("fails", (1, 2, 3), ENDLESS, ignore_eos=True)) as stream:
            await anext(stream)
            raise RuntimeError("client")

    async def story(engine: Engine) -> None:
        with pytest.raises(RuntimeError, match="client"):
            await fail(engine)

        assert 3 == len(tokens(await answer(engine, ask("next", (1, 2), 3, ignore_eos=True))))

    run_with_engine(folder("llama"), story)


REFUSED = [
    (ask("bad", ()), InvalidRequest),
    (ask("bad", (1, VOCABULARY)), InvalidRequest),
    (ask("bad", (-1,)), InvalidRequest),
    (ask("bad", (1, 2, 3), contents=token_contents((1, 2, 3), (1, 3))), InvalidRequest),
    (ask("bad", (1,), sampling=SamplingParams(logit_bias=((VOCABULARY, 1.0),))), InvalidRequest),
    (ask("bad", range(CONTEXT)), ContextTooLong),
    (ask("bad", (1,) * 1000), ContextTooLong),
]


@pytest.mark.parametrize(("request_", "error"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_requests_are_refused_at_open(folder: Folder, request_: Request, error: type[Exception]) -> None:
    """Without a computed token."""

    async def story(engine: Engine) -> None:
        with pytest.raises(error):
            await answer(engine, request_)

        assert 0 == engine.stats().steps_total
        assert 1 == len(tokens(await answer(engine, ask("bad", (1,), 1, ignore_eos=True))))

    run_with_engine(folder("llama"), story)


def test_a_too_long_prompt_reports_the_maximum_context(folder: Folder) -> None:
    """Found by the number of tokens, and by the length of the text."""

    async def story(engine: Engine) -> None:
        assert (64, CONTEXT) == (engine.info.context, engine.info.max_context)
        with pytest.raises(ContextTooLong) as counted:
            await answer(engine, ask("long", (1,) * 80))
        with pytest.raises(ContextTooLong) as estimated:
            engine.tokenizer.encode("the " * 10**6)

        assert [(64, CONTEXT)] * 2 == [(each.value.capacity, each.value.max_context) for each in (counted, estimated)]

    run_with_engine(folder("llama"), story, context=64)


def test_the_default_context_is_the_model_s(folder: Folder) -> None:
    """If the memory suffices."""

    async def story(engine: Engine) -> None:
        assert (CONTEXT, CONTEXT, 8) == (engine.info.context, engine.info.max_context, engine.info.slots)

    run_with_engine(folder("llama"), story, context=None, slots=None)


def test_a_duplicate_id_is_refused(folder: Folder) -> None:

    async def story(engine: Engine) -> None:
        async with engine.open(ask("name", (1, 2), ENDLESS, ignore_eos=True)):
            with pytest.raises(InvalidRequest):
                await answer(engine, ask("name", (1, 2)))

    run_with_engine(folder("llama"), story)


def test_a_full_queue_is_refused_with_retry_after(folder: Folder) -> None:
    """Slots and queue are full; the refused request is served later."""

    async def story(engine: Engine) -> None:
        jobs = [asyncio.create_task(answer(engine, ask(str(at), (1, 2), 40, ignore_eos=True))) for at in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refusal:
            await answer(engine, ask("late", (1, 2)))
        answers = await asyncio.gather(*jobs)

        assert 1.0 <= refusal.value.retry_after_seconds <= 60.0
        assert [40] * 3 == [len(tokens(events)) for events in answers]
        assert 2 == len(tokens(await answer(engine, ask("late", (1, 2), 2, ignore_eos=True))))

    run_with_engine(folder("llama"), story, slots=1, max_waiting=2)


def test_a_timeout_that_is_too_short_is_refused(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the stream begins; the id is free again, and other requests are not affected."""
    refuse = WaitPredictor.refusal

    def refusal(self: WaitPredictor, sequence: Sequence) -> TimeoutTooShort | None:
        timeout = sequence.request.timeout_seconds
        return TimeoutTooShort(timeout, 7.0) if timeout == 3.0 else refuse(self, sequence)

    monkeypatch.setattr(WaitPredictor, "refusal", refusal)

    async def story(engine: Engine) -> None:
        with pytest.raises(TimeoutTooShort) as refused:
            await answer(engine, ask("a", (1, 2), timeout_seconds=3.0))
        served = await answer(engine, ask("a", (1, 2), 2, ignore_eos=True, timeout_seconds=300.0))

        assert refused.value.retry_after_seconds == 4.0
        assert len(tokens(served)) == 2

    run_with_engine(folder("llama"), story)


def test_a_request_in_preparation_takes_a_place_of_the_queue(folder: Folder) -> None:

    async def story(engine: Engine) -> None:
        with ExitStack() as reservations:
            for _ in range(3):
                engine.check_admission("")
                reservations.enter_context(engine.reserve(""))
            with pytest.raises(Overloaded):
                engine.check_admission("")
        engine.check_admission("")

    run_with_engine(folder("llama"), story, slots=1, max_waiting=2)


def test_the_queue_is_limited_for_requests_that_are_compiled_first(folder: Folder) -> None:

    async def story(engine: Engine) -> None:
        jobs = [ask(str(at), (1, 2), 40, ignore_eos=True, stop_regex=("[0-9]{9}",)) for at in range(8)]
        answers = await asyncio.gather(*(answer(engine, job) for job in jobs), return_exceptions=True)

        assert 5 == sum(isinstance(one, Overloaded) for one in answers)

    run_with_engine(folder("llama"), story, slots=1, max_waiting=2)


def test_a_failure_right_after_a_snapshot_keeps_the_snapshot(folder: Folder) -> None:
    """Both reach the event loop in one iteration."""

    async def story(engine: Engine) -> None:
        snapshot = asyncio.create_task(engine.snapshot("", b""))
        await asyncio.sleep(0)
        (pending,) = engine._snapshots.values()
        pending.set_result(EMPTY_SNAPSHOT)
        engine._finish_loading(None, DraftingInfo(), EngineDead("a rank ended"))

        assert await snapshot == EMPTY_SNAPSHOT
        with pytest.raises(EngineDead):
            await engine.snapshot("", b"")

    run_with_engine(folder("llama"), story)


def test_a_failure_before_the_admission_of_a_request_is_raised(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with a timeout does not wait for a thread that has ended."""

    async def story(engine: Engine) -> None:
        with monkeypatch.context() as lost:
            lost.setattr(engine, "_inbox", queue.SimpleQueue())
            opening = asyncio.create_task(answer(engine, ask("a", (1, 2), timeout_seconds=60.0)))
            await asyncio.sleep(0)
            engine._finish_loading(None, DraftingInfo(), EngineDead("a rank ended"))
            with pytest.raises(EngineDead):
                await opening

    run_with_engine(folder("llama"), story)


def test_open_before_load_raises_loading(folder: Folder) -> None:
    """With the phase of the load; several tasks may wait for its end."""

    async def scene() -> None:
        entered, go_on = threading.Event(), threading.Event()

        def pause(phase: str) -> None:
            entered.set()
            go_on.wait(20)

        engine = Engine(EngineConfig(model=str(folder("llama")), context=CONTEXT, slots=1), on_phase=pause)
        engine.start()
        await asyncio.to_thread(entered.wait, 20)
        with pytest.raises(Loading, match="resolve"):
            await answer(engine, ask("early", (1, 2)))
        assert (engine.alive, engine.ready) == (True, False)
        go_on.set()
        await asyncio.gather(engine.wait_ready(), engine.wait_ready())
        assert (engine.alive, engine.ready, engine.phase) == (True, True, "ready")
        await asyncio.to_thread(engine.close)

    asyncio.run(scene())


def test_a_load_error_is_reported(tmp_path: Path) -> None:
    """Waiting tasks get the error, requests are refused, and the engine is not alive."""

    async def scene() -> None:
        engine = Engine(EngineConfig(model=str(tmp_path / "nothing")))
        engine.start()
        with pytest.raises(ModelMissing):
            await engine.wait_ready()
        with pytest.raises(EngineDead):
            await answer(engine, ask("late", (1, 2)))

        assert not engine.alive
        assert not engine.ready
        assert engine.phase.startswith("dead: ")
        await asyncio.to_thread(engine.close)

    asyncio.run(scene())


def test_drain_waits_for_running_requests(folder: Folder) -> None:
    """New requests are refused; running ones get all their text."""

    async def story(engine: Engine) -> None:
        job = asyncio.create_task(answer(engine, ask("runs", (1, 2), 60, ignore_eos=True)))
        await asyncio.sleep(0)
        drain = asyncio.create_task(engine.drain(20))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            await answer(engine, ask("late", (1, 2)))
        await drain

        assert 60 == len(tokens(await job))
        assert (False, "draining") == (engine.ready, engine.phase)

    run_with_engine(folder("llama"), story)


def test_drain_fails_requests_at_its_deadline(folder: Folder) -> None:
    """Failed is the last event of each."""

    async def story(engine: Engine) -> None:
        job = asyncio.create_task(answer(engine, ask("runs", (1, 2), 100_000, ignore_eos=True, overflow="shift")))
        await asyncio.sleep(0)
        await engine.drain(0.0)

        assert isinstance((await job)[-1], Failed)

    run_with_engine(folder("llama"), story)


def test_a_dead_thread_fails_all_streams(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running requests fail, new ones are refused, and the phase is "dead"."""

    def broken(core: Core) -> object:
        raise MemoryError("no memory")

    async def story(engine: Engine) -> None:
        monkeypatch.setattr(Core, "step", broken)
        events = await answer(engine, ask("runs", (1, 2), ENDLESS, ignore_eos=True))
        with pytest.raises(EngineDead) as dead:
            await answer(engine, ask("late", (1, 2)))

        assert [Failed] == [type(event) for event in events]
        assert not engine.alive
        assert ("dead: MemoryError", "the engine stopped: MemoryError") == (engine.phase, str(dead.value))

    run_with_engine(folder("llama"), story)


def test_a_failing_step_fails_only_its_requests(folder: Folder) -> None:
    """The next request is served."""

    def broken(*_: object) -> None:
        raise RuntimeError("no logits")

    async def story(engine: Engine) -> None:
        hook = engine._require_model().model.register_forward_pre_hook(broken)
        events = await answer(engine, ask("breaks", (1, 2), 5, ignore_eos=True))
        hook.remove()
        after = await answer(engine, ask("after", (1, 2), 5, ignore_eos=True))

        assert [Started, Failed] == [type(event) for event in events]
        assert 5 == len(tokens(after))
        assert 1 == engine.stats().failed_total

    run_with_engine(folder("llama"), story)


def test_a_slow_reader_blocks_no_other_stream(folder: Folder) -> None:
    """The unread stream keeps its events."""

    async def story(engine: Engine) -> None:
        async with engine.open(ask("silent", (3, 4), 30, ignore_eos=True)) as stream:
            events = await answer(engine, ask("reads", (1, 2), 60, ignore_eos=True))
            late = [event async for event in stream]

        assert 60 == len(tokens(events))
        assert 30 == len(tokens(late))
        assert len(late) < 30

    run_with_engine(folder("llama"), story)


def test_close_is_idempotent(folder: Folder) -> None:

    async def story(engine: Engine) -> None:
        await asyncio.to_thread(engine.close)

        assert not engine.alive

    run_with_engine(folder("llama"), story)
