"""Exceptions in commands and in statistics fail what they concern alone, and the engine thread goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.adapters.store import AdapterStore
from engine.config import EngineConfig
from engine.draft.speculation import Speculation
from engine.embedder.scheduler import EmbeddingScheduler
from engine.engine import Engine
from engine.errors import EngineError
from engine.schedule.inspection import Inspection
from engine.schedule.scheduler import Scheduler
from engine.schedule.totals import Totals
from engine.types.events import Delta, Event, Failed, Finished
from engine.types.request import EmbeddingInput, EmbeddingJob, Request
from tests.engine.kit.models import CONTEXT, Models, References, core
from tests.engine.kit.play import Job, ask, play

PROMPT = (5, 4, 3, 2, 1)


def out_of_memory(*_: object) -> Any:
    """In place of a method."""
    raise MemoryError


def test_a_request_that_cannot_be_queued_fails_alone(
    loaded: Models, reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = core(loaded("llama"))
    engine.submit(ask("runs", PROMPT, 9, ignore_eos=True))
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "submit", out_of_memory)
        engine.submit(ask("fails", PROMPT, 9))
    events = [event for _ in range(12) for event in engine.step()]

    assert [Failed("it could not be queued (MemoryError)")] == [event for name, event in events if name == "fails"]
    tokens = [token for name, event in events if isinstance(event, Delta) and name == "runs" for token in event.tokens]
    assert list(reference("llama").greedy(PROMPT, 9)) == tokens
    assert (1, 0, 0) == (engine.stats().failed_total, engine.stats().running, engine.stats().waiting)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Inspection, "record_finished"),
        (Totals, "record_end"),
        (AdapterStore, "release"),
        (Speculation, "forget"),
    ],
)
def test_a_sequence_leaves_despite_an_exception(
    loaded: Models, reference: References, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """Cancelled, or at its end: its slot is free, and the others get their texts."""
    engine = core(loaded("llama"), slots=2)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, out_of_memory)
        answers = play(
            engine,
            [
                Job(ask("ends", PROMPT, 4, ignore_eos=True)),
                Job(ask("leaves", (9, 8, 7), 40, ignore_eos=True), leaves=3),
                Job(ask("waits", PROMPT, 12, ignore_eos=True)),
            ],
        )

    assert [4, 12] == [len(answers[name].tokens) for name in ("ends", "waits")]
    assert list(reference("llama").greedy(PROMPT, 12)) == answers["waits"].tokens
    assert (0, 0, 0) == (engine.stats().running, engine.stats().waiting, engine.stats().cells_used)


def test_the_engine_survives_failing_snapshots_and_statistics(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot is an error, statistics stay those before, and the next ones are right."""

    async def answer(engine: Engine, request: Request) -> list[Event]:
        async with engine.open(request) as stream:
            return [event async for event in stream]

    async def scene() -> None:
        engine = Engine(EngineConfig(model=str(folder("llama")), context=CONTEXT, slots=2, dtype="float64"))
        engine.start()
        try:
            await engine.wait_ready()
            with monkeypatch.context() as patch:
                patch.setattr(Inspection, "stats", out_of_memory)
                with pytest.raises(EngineError, match="the snapshot failed"):
                    await engine.snapshot("", b"")
                *_, end = await answer(engine, ask("one", PROMPT, 4, ignore_eos=True))
                assert isinstance(end, Finished)
                assert engine.alive
            *_, end = await answer(engine, ask("two", PROMPT, 4, ignore_eos=True))
            assert isinstance(end, Finished)
            assert 8 == (await engine.snapshot("", b"")).stats.generated_tokens_total
        finally:
            await asyncio.to_thread(engine.close)

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_an_embedding_job_that_cannot_be_queued_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    embedder: Any = SimpleNamespace()
    scheduler = EmbeddingScheduler(embedder, max_batch_tokens=8)
    monkeypatch.setattr("engine.embedder.scheduler._QueuedJob", out_of_memory)
    scheduler.submit(EmbeddingJob("job", (EmbeddingInput((1, 2)),)))

    assert scheduler.busy
    assert [("job", Failed("it could not be queued (MemoryError)"))] == scheduler.step(0.0)
    assert not scheduler.busy
