"""The embedding model and the generating model on one thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import Draining, InvalidRequest, Loading, ModelUnsupported, Overloaded
from engine.types.events import Delta, Embedded, Event, Failed, Finished
from engine.types.request import EmbeddingInput, EmbeddingJob, Request
from tests.engine.embedder.folders import TEXTS, load, states
from tests.engine.kit.models import CONTEXT, Reference
from tests.engine.kit.play import ask

Folder = Callable[[str], Path]


@pytest.fixture
def run_story(folder: Folder, embedder_folder: Folder) -> Callable[..., None]:
    """Run a coroutine with an engine of both models, for half a minute at most."""

    def run(
        story: Callable[[Engine], Awaitable[None]], model: str = "llama", kind: str = "bert", **settings: Any
    ) -> None:
        beside = str(embedder_folder(kind))
        config = {"context": CONTEXT, "slots": 2, "threads": 1, "embedding_model": beside, **settings}

        async def scene() -> None:
            async with asyncio.timeout(30), _running(EngineConfig(model=str(folder(model)), **config)) as engine:
                await story(engine)

        asyncio.run(scene())

    return run


@asynccontextmanager
async def _running(config: EngineConfig) -> Any:
    engine = Engine(config)
    engine.start()
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await asyncio.to_thread(engine.close)


async def embed(engine: Engine, id: str, inputs: tuple[EmbeddingInput, ...]) -> list[Event]:
    """All events of a job."""
    async with engine.embed(EmbeddingJob(id, inputs)) as stream:
        return [event async for event in stream]


async def speak(engine: Engine, request: Request) -> list[int]:
    """The tokens of an answer."""
    async with engine.open(request) as stream:
        return [token async for event in stream if isinstance(event, Delta) for token in event.tokens]


def vectors(events: list[Event]) -> torch.Tensor:
    """The vectors of a job."""
    return torch.stack([torch.tensor(np.frombuffer(e.vector, "<f4")) for e in events if isinstance(e, Embedded)])


@pytest.mark.parametrize(("model", "kind"), [("llama", "bert"), ("qwen3", "qwen3"), ("jamba", "llama")])
def test_generation_and_embedding_share_the_thread_unchanged(
    run_story: Callable[..., None], embedder_folder: Folder, reference: Callable[..., Reference], model: str, kind: str
) -> None:
    """Many jobs and many answers at once: greedy text equals `generate`, vectors equal transformers."""

    async def story(engine: Engine) -> None:
        inputs = tuple(engine.embedding_tokenizer.encode(text) for text in TEXTS)
        prompts = [(5, 6, 7), (5, 6, 7, 8), (9,), (1, 2, 3)]
        texts, embedded = await asyncio.gather(
            asyncio.gather(
                *(speak(engine, ask(f"s{at}", prompt, 12, ignore_eos=True)) for at, prompt in enumerate(prompts))
            ),
            asyncio.gather(*(embed(engine, f"e{at}", inputs) for at in range(8))),
        )
        alone = torch.stack([states(embedder_folder(kind), each.tokens).mean(0) for each in inputs])
        for prompt, tokens in zip(prompts, texts, strict=True):
            assert list(reference(model, "float32").greedy(prompt, 12)) == tokens
        for events in embedded:
            assert torch.allclose(alone, vectors(events), rtol=0, atol=1e-5)
        counts = engine.stats().embedding
        assert (0, 8 * len(TEXTS)) == (counts.waiting, counts.texts_total)

    run_story(story, model, kind, dtype="float32")


def test_cancelled_embedding_job_is_not_computed(run_story: Callable[..., None]) -> None:
    async def story(engine: Engine) -> None:
        many = tuple(EmbeddingInput((5,) * 40) for _ in range(2000))
        async with engine.embed(EmbeddingJob("leaves", many)) as stream:
            await anext(stream)
        events = await embed(engine, "stays", many[:1])
        async with asyncio.timeout(3):
            while engine.stats().embedding.waiting:
                await asyncio.sleep(0)

        assert isinstance(events[-1], Finished)
        assert engine.stats().embedding.texts_total < 1000

    run_story(story)


def test_embedding_jobs_share_the_queue_limit(run_story: Callable[..., None]) -> None:
    """At shutdown queued jobs are refused and running ones finish."""

    async def story(engine: Engine) -> None:
        many = tuple(EmbeddingInput((5,) * 40) for _ in range(2000))
        async with engine.embed(EmbeddingJob("a", many)) as stream, engine.embed(EmbeddingJob("b", many)):
            with pytest.raises(Overloaded):
                await embed(engine, "c", many)
            await engine.drain(0.01)
            with pytest.raises(Draining):
                await embed(engine, "d", many)

            assert Failed("the server is shutting down") == [event async for event in stream][-1]

    run_story(story, max_waiting=0)


def test_embedding_job_without_inputs_is_refused(run_story: Callable[..., None]) -> None:
    async def story(engine: Engine) -> None:
        with pytest.raises(InvalidRequest):
            await embed(engine, "empty", ())

    run_story(story)


def test_memory_plan_counts_the_embedding_model(
    run_story: Callable[..., None], embedder_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = load(embedder_folder("bert")).info.workspace_bytes
    free = work + 2**30
    monkeypatch.setattr("engine.load.plan.memory.available_bytes", lambda _: free)
    monkeypatch.setattr("engine.embedder.loading.available_bytes", lambda _: free)

    async def story(engine: Engine) -> None:
        assert free - work == engine.memory.available_bytes

    run_story(story)


def test_failed_embedding_load_fails_the_start(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')

    async def story() -> None:
        engine = Engine(EngineConfig(model=str(folder("llama")), embedding_model=str(tmp_path)))
        engine.start()
        with pytest.raises(ModelUnsupported, match="no safetensors weights"):
            await engine.wait_ready()
        assert engine.embedding is None
        assert not engine.alive
        await asyncio.to_thread(engine.close)

    asyncio.run(story())


def test_requests_are_refused_until_both_models_are_loaded(folder: Folder, embedder_folder: Folder) -> None:
    async def story() -> None:
        engine = Engine(EngineConfig(model=str(folder("llama")), embedding_model=str(embedder_folder("bert"))))
        engine.start()
        with pytest.raises(Loading):
            await embed(engine, "early", (EmbeddingInput((5,)),))
        await asyncio.to_thread(engine.close)

    asyncio.run(story())
