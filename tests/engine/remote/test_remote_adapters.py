"""Adapters of an engine in a worker process: loaded by calls and by requests, and known to the front end at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import AdapterLoaded, AdapterPathRefused, AdapterUnknown, InvalidRequest
from engine.remote.engine import RemoteEngine
from engine.remote.zygote import Zygote
from engine.types.events import Delta
from tests.engine.kit.adapters import LINEAR, save_adapter
from tests.engine.kit.models import CONTEXT
from tests.engine.kit.play import ask


async def answer(engine: RemoteEngine, adapter: str) -> list[int]:
    async with engine.open(ask("id", range(30, 50), 6, adapter=adapter, ignore_eos=True)) as stream:
        events = [event async for event in stream]
    return [token for event in events if isinstance(event, Delta) for token in event.tokens]


def names(engine: RemoteEngine) -> list[str]:
    return [info.name for info in engine.info.adapters]


def test_adapters_are_loaded_and_unloaded(folder: Callable[[str], Path], tmp_path: Path, zygote: Zygote) -> None:
    model = folder("llama")
    for seed, name in enumerate(("a", "b")):
        save_adapter(model, tmp_path / name, {"r": 4, "target_modules": LINEAR}, seed)
    config = EngineConfig(
        model=str(model), context=CONTEXT, slots=2, dtype="float64", drafter="none", lora_dir=str(tmp_path)
    )

    async def story(engine: RemoteEngine) -> None:
        engine.start()
        await engine.wait_ready()
        assert names(engine) == []
        texts = {name: await answer(engine, name) for name in ("", "a")}
        assert names(engine) == ["a"]
        await engine.load_adapter("x", "b", in_place=False)
        assert sorted(names(engine)) == ["a", "x"]
        texts["x"] = await answer(engine, "x")
        assert len({tuple(text) for text in texts.values()}) == 3
        with pytest.raises(AdapterLoaded):
            await engine.load_adapter("x", "a", in_place=False)
        with pytest.raises(AdapterPathRefused):
            await engine.load_adapter("y", "../..", in_place=False)
        engine.unload_adapter("x")
        assert (names(engine), engine.has_adapter("x"), engine.has_adapter("b")) == (["a"], False, True)
        with pytest.raises(AdapterUnknown):
            engine.unload_adapter("x")
        with pytest.raises(InvalidRequest, match="no adapter"):
            await answer(engine, "x")
        assert await answer(engine, "b") == texts["x"]

    async def scene() -> None:
        engine = RemoteEngine(config, launch=zygote.launch)
        try:
            await asyncio.wait_for(story(engine), 120)
        finally:
            await asyncio.to_thread(engine.close)

    asyncio.run(scene())
