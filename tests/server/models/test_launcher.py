"""The launcher with worker processes: plans, grants and loads of the bundled model."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ModelMissing, ModelUnsupported
from engine.remote.planning import measure_budget
from engine.remote.zygote import Zygote
from engine.types.request import Request, SamplingParams
from server.configuration.settings import Settings
from server.models.entry import ModelEntry
from server.models.launcher import WorkerLauncher

BUNDLED = Path(__file__).parents[3] / "models" / "target"
BUDGET = 2 * 2**30


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    zygote.start()
    yield zygote
    zygote.close()


@pytest.fixture
def run(zygote: Zygote) -> Callable[[Callable[[WorkerLauncher], Coroutine[None, None, None]]], None]:
    return lambda scenario: asyncio.run(scenario(WorkerLauncher(zygote.launch, BUDGET)))


def entry(model: Path | None, **values: object) -> ModelEntry:
    return ModelEntry("a", Settings(model=None if model is None else str(model), **values))  # type: ignore[arg-type]


def test_a_model_loads_within_its_plan(run: Callable[..., None]) -> None:
    async def scenario(launcher: WorkerLauncher) -> None:
        model = entry(None, context=512, slots=2)
        needed = await launcher.needed_bytes(model)
        assert 2**20 < needed < BUDGET
        engine = launcher.start(model, needed)
        try:
            await engine.wait_ready()
            assert (engine.info.context, engine.info.slots) == (512, 2)
            assert engine.drafting.model is not None
            request = Request("r", tuple(range(1, 9)), SamplingParams(temperature=0.0), max_tokens=16)
            async with engine.open(request) as stream:
                assert [event async for event in stream]
            assert await asyncio.to_thread(engine.private_bytes) < needed
        finally:
            await launcher.stop(engine)
        assert not engine.alive

    run(scenario)


def test_a_plan_too_large_is_kept_until_a_file_changes(run: Callable[..., None], tmp_path: Path) -> None:
    folder = shutil.copytree(BUNDLED, tmp_path / "model")

    async def scenario(launcher: WorkerLauncher) -> None:
        model = entry(folder, context=100_000_000, slots=64)
        with pytest.raises(ModelUnsupported, match="--context") as first:
            await launcher.needed_bytes(model)
        with pytest.raises(ModelUnsupported) as second:
            await launcher.needed_bytes(model)
        assert first.value is second.value
        (folder / "config.json").touch()
        with pytest.raises(ModelUnsupported) as third:
            await launcher.needed_bytes(model)
        assert first.value is not third.value

    run(scenario)


def test_a_missing_model_is_looked_for_again(run: Callable[..., None], tmp_path: Path) -> None:
    async def scenario(launcher: WorkerLauncher) -> None:
        model = entry(tmp_path / "model")
        with pytest.raises(ModelMissing):
            await launcher.needed_bytes(model)
        shutil.copytree(BUNDLED, tmp_path / "model")
        assert await launcher.needed_bytes(model) > 0

    run(scenario)


def test_the_budget_is_that_of_the_settings(zygote: Zygote) -> None:
    budget = asyncio.run(measure_budget(EngineConfig(memory="300MiB"), zygote.launch))
    assert 200 * 2**20 < budget <= 300 * 2**20
