"""Adapters that are loaded and unloaded while an engine thread runs: texts, prefixes, and steps that do not wait."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from engine.adapters.config import CONFIG_FILE
from engine.engine import Engine
from engine.errors import AdapterUnsupported, EngineError, InvalidRequest
from engine.types.events import Started
from engine.types.request import Request
from tests.engine.kit.adapters import LINEAR, AdaptedReference, change_weights, save_adapter
from tests.engine.kit.play import ask
from tests.engine.test_engine import answer, run_with_engine, tokens

Folder = Callable[[str], Path]
COUNT, TOKENS = 16, 6
PROMPT = tuple(range(30, 50))


@pytest.fixture(scope="module")
def root(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 16 adapters."""
    root = tmp_path_factory.mktemp("adapters")
    for seed in range(COUNT):
        save_adapter(folder("llama"), root / f"a{seed}", {"r": 1 + seed, "target_modules": LINEAR}, seed)
    return root


@pytest.fixture(scope="module")
def expected(folder: Folder, root: Path) -> dict[str, list[int]]:
    """PEFT's tokens by adapter."""
    names = ["", *(f"a{seed}" for seed in range(COUNT))]
    texts = {
        name: AdaptedReference(folder("llama"), root / name if name else None, torch.float64).greedy(PROMPT, TOKENS)
        for name in names
    }
    assert len({tuple(text) for text in texts.values()}) == len(names)
    return texts


def asked(name: str, id: str, count: int = TOKENS) -> Request:
    return ask(id, PROMPT, count, adapter=name, ignore_eos=True)


def run(folder: Path, root: Path, story: Callable[[Engine], Awaitable[None]], **settings: object) -> None:
    run_with_engine(folder, story, **{"slots": 4, "lora_dir": str(root), "drafter": "none", **settings})


def test_random_traffic_of_more_adapters_than_slots(folder: Folder, root: Path, expected: dict[str, list[int]]) -> None:
    """16 adapters, 8 in memory, with calls that load and unload them under other names: each text is its adapter's."""

    async def story(engine: Engine) -> None:
        generator, errors = random.Random(7), list[str]()

        async def client(number: int) -> None:
            for turn in range(12):
                name = generator.choice(list(expected))
                assert tokens(await answer(engine, asked(name, f"{number} {turn}"))) == expected[name], name
                assert len(engine.info.adapters) <= 8

        async def caller(alias: str) -> None:
            for _ in range(10):
                name = generator.choice([name for name in expected if name])
                try:
                    await engine.load_adapter(alias, name, in_place=generator.random() < 0.5)
                    async with engine.open(asked(alias, alias)) as stream:
                        events = [await anext(aiter(stream))]
                        engine.unload_adapter(alias)
                        events += [event async for event in stream]
                    assert tokens(events) == expected[name], name
                except EngineError as error:
                    errors.append(str(error))
                await asyncio.sleep(0.001)

        await asyncio.gather(*(client(number) for number in range(6)), caller("x"), caller("y"))
        assert all("--max-loras" in error for error in errors), errors
        assert engine.stats().failed_total == 0

    run(folder("llama"), root, story)


def test_an_adapter_of_the_folder_is_loaded_at_its_first_request(
    folder: Folder, root: Path, expected: dict[str, list[int]]
) -> None:
    """Others are refused."""

    async def story(engine: Engine) -> None:
        assert engine.info.adapters == ()
        assert (engine.has_adapter("a3"), engine.has_adapter("other")) == (True, False)
        assert tokens(await answer(engine, asked("a3", "first"))) == expected["a3"]
        assert [info.name for info in engine.info.adapters] == ["a3"]
        assert engine.stats().adapters == 1
        assert engine.stats().adapter_bytes == engine.info.adapters[0].bytes
        for name in ("other", "../a3", str(root / "a3")):
            with pytest.raises(InvalidRequest, match="no adapter"):
                await answer(engine, asked(name, "refused"))

    run(folder("llama"), root, story)


def test_a_new_version_has_no_prefix_of_the_old_one(folder: Folder, root: Path, expected: dict[str, list[int]]) -> None:
    """Requests that run keep the old version."""

    async def story(engine: Engine) -> None:
        await engine.load_adapter("x", "a1", in_place=False)
        long = AdaptedReference(folder("llama"), root / "a1", torch.float64).greedy(PROMPT, 60)
        async with engine.open(asked("x", "old", 60)) as stream:
            events = [await anext(aiter(stream))]
            await engine.load_adapter("x", "a2", in_place=True)
            new = await answer(engine, asked("x", "new"))
            events += [event async for event in stream]
        assert tokens(events) == long
        assert tokens(new) == expected["a2"]
        assert isinstance(new[0], Started)
        assert new[0].cached_tokens == 0
        again = await answer(engine, asked("a2", "again"))
        assert isinstance(again[0], Started)
        # The same files under another name.
        assert again[0].cached_tokens == len(PROMPT) - 1

    run(folder("llama"), root, story)


def test_broken_files_leave_everything_as_it_was(folder: Folder, root: Path, tmp_path: Path) -> None:
    """At a call and at a first request: an error of the caller, and the next request is served."""
    for name in ("nan", "truncated", "empty", "config", "link"):
        shutil.copytree(root / "a1", tmp_path / "lora" / name)
    weights = "adapter_model.safetensors"
    change_weights(tmp_path / "lora/nan", lambda all: {name: matrix * torch.nan for name, matrix in all.items()})
    content = (tmp_path / "lora/truncated" / weights).read_bytes()
    (tmp_path / "lora/truncated" / weights).write_bytes(content[:1000])
    (tmp_path / "lora/empty" / weights).unlink()
    (tmp_path / "lora/config" / CONFIG_FILE).write_text("[" * 100_000)
    (tmp_path / "lora/link" / weights).unlink()
    (tmp_path / "lora/link" / weights).symlink_to(root / "a1" / weights)

    async def story(engine: Engine) -> None:
        before = tokens(await answer(engine, asked("", "before")))
        for name in ("nan", "truncated", "empty", "config", "link"):
            with pytest.raises(AdapterUnsupported):
                await engine.load_adapter(name, name, in_place=False)
            with pytest.raises(AdapterUnsupported):
                await answer(engine, asked(name, name))
        assert engine.info.adapters == ()
        assert tokens(await answer(engine, asked("", "after"))) == before

    run(folder("llama"), tmp_path / "lora", story)


@pytest.mark.slow
def test_loads_beside_streams_change_no_text(folder: Folder, root: Path) -> None:
    """100 rounds of loads and unloads beside 8 streams. benchmarks/cpu/adapter_loads.py measures their delays."""
    count = 80
    names = [f"a{seed}" for seed in range(4)]
    texts = {
        name: AdaptedReference(folder("llama"), root / name, torch.float64).greedy(PROMPT, count) for name in names
    }

    async def story(engine: Engine) -> None:
        done = asyncio.Event()

        async def stream(number: int) -> int:
            turn, name = 0, names[number % 4]
            while not done.is_set():
                turn += 1
                assert tokens(await answer(engine, asked(name, f"{number} {turn}", count))) == texts[name], name
            return turn

        streams = [asyncio.create_task(stream(number)) for number in range(8)]
        for turn in range(100):
            await engine.load_adapter("x", f"a{turn % COUNT}", in_place=False)
            engine.unload_adapter("x")
        done.set()
        assert min(await asyncio.gather(*streams)) > 0
        assert engine.stats().failed_total == 0

    run(folder("llama"), root, story, slots=8)
