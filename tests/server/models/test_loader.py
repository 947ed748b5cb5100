"""The loader: order of loads, victims, turns, keep_alive, failures, and the end of the server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine.errors import Draining, EngineDead, Loading, ModelUnsupported, Overloaded, PlanTooLarge, Unavailable
from server.http.errors import LOAD_TIMEOUT, ApiError
from server.models.entry import ModelEntry
from server.models.loader import Loader, LoaderLimits
from tests.server.fakes import settings
from tests.server.models.fake_launcher import FakeLauncher
from tests.virtual_time import run_in_virtual_time

SETTINGS = settings()
SIZES = {"a": 4, "b": 4, "c": 2}


def _run(
    scenario: Callable[[Loader, FakeLauncher], Awaitable[None]],
    budget: int = 6,
    pinned: str = "",
    launcher: FakeLauncher | None = None,
    **limits: Any,
) -> None:
    async def work() -> None:
        fake = launcher or FakeLauncher(SIZES, budget)
        entries = [ModelEntry(name, SETTINGS, pinned=name in pinned) for name in fake.needed]
        loader = Loader(entries, fake, LoaderLimits(budget, **limits), fake)
        loader.start()
        await scenario(loader, fake)
        fake.is_closing = True
        await loader.close()
        assert not fake.running
        assert not fake.faults

    run_in_virtual_time(work())


async def _use(loader: Loader, name: str, seconds: float = 0.0, keep_alive: float | None = None) -> float:
    """Use a model; the time of the lease."""
    with await loader.acquire(name, keep_alive=keep_alive):
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
    return began


def test_the_least_recently_used_idle_model_is_unloaded() -> None:
    async def scenario(loader: Loader, launcher: FakeLauncher) -> None:
        for name in ("a", "c", "a", "b"):
            await _use(loader, name)
            await asyncio.sleep(1)
        # c was used before a, but b needs the memory of a.
        assert launcher.unloads == [("a", "memory")]
        assert [loader.status(name).state for name in SIZES] == ["unloaded", "ready", "ready"]

    _run(scenario)


def test_concurrent_requests_share_a_load() -> None:
    async def scenario(loader: Loader, launcher: FakeLauncher) -> None:
        first = asyncio.create_task(_use(loader, "a"))
        await asyncio.sleep(1)
        assert loader.status("a").state == "loading"
        assert loader.status("a").phase == "loading weights 43 %"
        second = asyncio.create_task(_use(loader, "a"))
        assert await first == await second
        assert launcher.starts == ["a"]

    _run(scenario)


def test_a_model_in_use_is_swapped_after_its_turn_and_its_streams() -> None:
    async def scenario(loader: Loader, launcher: FakeLauncher) -> None:
        stream = asyncio.create_task(_use(loader, "a", seconds=50))
        await asyncio.sleep(10)
        waiting = asyncio.create_task(_use(loader, "b", seconds=40))
        await asyncio.sleep(35)
        # Requests of the swapped model come after the waiting one.
        late = asyncio.create_task(_use(loader, "a"))
        await asyncio.sleep(0)
        assert loader.status("a").state == "draining"
        assert await stream + 50 < await waiting < await late
        assert launcher.starts == ["a", "b", "a"]

    _run(scenario)


def test_a_small_model_passes_a_waiting_one_until_that_has_its_turn() -> None:
    async def scenario(loader: Loader, launcher: FakeLauncher) -> None:
        stream = asyncio.create_task(_use(loader, "a", seconds=100))
        await asyncio.sleep(10)
        waiting = asyncio.create_task(_use(loader, "b"))
        await asyncio.sleep(1)
        assert await _use(loader, "c", keep_alive=0) < 20
        await asyncio.sleep(40)
        late = asyncio.create_task(_use(loader, "c"))
        assert await stream + 100 < await waiting < await late + 1

    _run(scenario)


def test_keep_alive_of_a_request_replaces_the_last_one() -> None:
    async def scenario(loader: Loader, launcher: FakeLauncher) -> None:
        await _use(loader, "a", keep_alive=5)
        assert loader.status("a").expires_in == pytest.approx(5)
        await asyncio.sleep(4)
        await _use(loader, "a")
        await asyncio.sleep(4.9)
        assert loader.status("a").state == "ready"
        await asyncio.sleep(0.2)
        assert loader.status("a").state == "draining"
        await asyncio.sleep(1)
        await _use(loader, "a", keep_alive=math.inf)
        assert loader.status("a").expires_in is None
        assert launcher.unloads == [("a", "idle")]

    _run(scenario, keep_alive=30.0)


def test_a_pinned_model_stays() -> None:
    async def scenario(loader: Loader, launcher: FakeLauncher) -> None:
        await asyncio.sleep(5)
        assert loader.status("a").state == "ready"
        await _use(loader, "a", keep_alive=0)
        loader.unload("a")
        with pytest.raises(PlanTooLarge, match=r"needs 4 bytes of 2 bytes available: give the model b a smaller"):
            await _use(loader, "b")
        assert loader.status("b").state == "failed"
        await _use(loader, "c")
        assert launcher.unloads == []

    _run(scenario, pinned="a")


def test_a_request_to_unload_waits_for_the_running_ones() -> None:
    async def scenario(loader: Loader, launcher: FakeLauncher) -> None:
        stream = asyncio.create_task(_use(loader, "a", seconds=10))
        await asyncio.sleep(5)
        loader.unload("a")
        assert loader.status("a").state == "draining"
        await stream
        await asyncio.sleep(1)
        assert loader.status("a").state == "unloaded"
        loader.request_load("a")
        await asyncio.sleep(5)
        assert loader.status("a").state == "ready"
        assert launcher.unloads == [("a", "request")]

    _run(scenario)


def test_a_model_unloaded_while_it_loads_serves_its_requests_first() -> None:
    async def scenario(loader: Loader, launcher: FakeLauncher) -> None:
        waiting = asyncio.create_task(_use(loader, "a"))
        await asyncio.sleep(1)
        loader.unload("a")
        await waiting
        await asyncio.sleep(1)
        assert loader.status("a").state == "unloaded"

    _run(scenario)


def test_a_failed_load_ends_the_wait_and_the_next_request_loads_again() -> None:
    async def scenario(loader: Loader, launcher: FakeLauncher) -> None:
        launcher.failures["a"] = ModelUnsupported("a", "wrong outputs")
        waiting = [asyncio.create_task(_use(loader, "a")) for _ in range(2)]
        for request in waiting:
            with pytest.raises(ModelUnsupported):
                await request
        await asyncio.sleep(1)
        assert loader.status("a").state == "failed"
        assert "wrong outputs" in loader.status("a").reason
        del launcher.failures["a"]
        await _use(loader, "a")
        assert loader.status("a").reason == ""
        assert launcher.outcomes == {"failed": 1, "ready": 1}

    _run(scenario)


def test_loads_after_frequent_crashes_are_delayed() -> None:
    async def scenario(loader: Loader, launcher: FakeLauncher) -> None:
        for _ in range(3):
            await _use(loader, "a")
            launcher.running[0].dead.set()
            await asyncio.sleep(1)
        with pytest.raises(Unavailable, match="ended several times") as error:
            await _use(loader, "a")
        assert error.value.retry_after_seconds == pytest.approx(59)
        await _use(loader, "b")
        await asyncio.sleep(60)
        await _use(loader, "a")
        next(process for process in launcher.running if process.entry.name == "a").dead.set()
        await asyncio.sleep(1)
        with pytest.raises(Unavailable) as error:
            await _use(loader, "a")
        assert error.value.retry_after_seconds == pytest.approx(119)

    _run(scenario)


def test_a_crash_leaves_the_other_models() -> None:
    async def scenario(loader: Loader, launcher: FakeLauncher) -> None:
        other = asyncio.create_task(_use(loader, "c", seconds=20))
        stream = asyncio.create_task(_use(loader, "a", seconds=5))
        await asyncio.sleep(5)
        next(process for process in launcher.running if process.entry.name == "a").dead.set()
        await asyncio.sleep(1)
        assert loader.status("a").state == "failed"
        assert loader.status("a").reason == str(EngineDead("killed"))
        await _use(loader, "a")
        # The lease of the ended process does not count for the new one.
        await stream
        assert loader.status("a").leases == 0
        await other
        assert launcher.unloads == [("a", "crash")]

    _run(scenario)


def test_a_request_waits_for_a_limited_time_and_the_load_goes_on() -> None:
    async def scenario(loader: Loader, launcher: FakeLauncher) -> None:
        with pytest.raises(ApiError) as error:
            await _use(loader, "a")
        assert error.value.kind == LOAD_TIMEOUT
        await asyncio.sleep(3)
        assert loader.status("a").state == "ready"

    _run(scenario, load_timeout=1.0)


def test_a_request_may_refuse_to_wait() -> None:
    async def scenario(loader: Loader, launcher: FakeLauncher) -> None:
        with pytest.raises(Loading):
            await loader.acquire("a", waits=False)
        assert loader.status("a").state == "unloaded"

    _run(scenario)


def test_the_number_of_waiting_requests_is_limited() -> None:
    async def scenario(loader: Loader, launcher: FakeLauncher) -> None:
        waiting = [asyncio.create_task(_use(loader, name)) for name in "ab"]
        await asyncio.sleep(0.1)
        with pytest.raises(Overloaded):
            await loader.acquire("c")
        await asyncio.gather(*waiting)

    _run(scenario, max_waiting=2)


def test_the_end_of_the_server_drains_all_models() -> None:
    async def scenario(loader: Loader, launcher: FakeLauncher) -> None:
        streams = [asyncio.create_task(_use(loader, name, seconds=20)) for name in "ac"]
        await asyncio.sleep(5)
        waiting = asyncio.create_task(_use(loader, "b"))
        await asyncio.sleep(1)
        draining = asyncio.create_task(loader.drain(30))
        with pytest.raises(Draining):
            await waiting
        with pytest.raises(Draining):
            await loader.acquire("a")
        await asyncio.gather(*streams, draining)

    _run(scenario)


def test_models_are_added_and_removed() -> None:
    async def scenario(loader: Loader, launcher: FakeLauncher) -> None:
        launcher.needed["d"] = 1
        loader.add(ModelEntry("d", SETTINGS))
        using = asyncio.create_task(_use(loader, "d", 10))
        await asyncio.sleep(5)
        loader.remove("d")
        with pytest.raises(ApiError, match="'d' was removed"):
            await loader.acquire("d")
        assert loader.status("d").state == "draining"
        await using
        await asyncio.sleep(1)
        assert "d" not in loader.names
        assert loader.status("d").state == "unloaded"
        assert launcher.unloads == [("d", "request")]

    _run(scenario)


@pytest.mark.parametrize("seconds", [0.1, 2.0])
def test_requests_that_wait_for_a_removed_model_fail(seconds: float) -> None:
    """While its memory is planned, and while it loads."""

    async def scenario(loader: Loader, launcher: FakeLauncher) -> None:
        waiting = asyncio.create_task(loader.acquire("a"))
        await asyncio.sleep(seconds)
        loader.remove("a")
        with pytest.raises(ApiError, match="'a' was removed"):
            await waiting
        await asyncio.sleep(1)
        assert "a" not in loader.names

    _run(scenario)


def test_a_model_that_returns_is_loaded_after_its_running_requests() -> None:
    async def scenario(loader: Loader, launcher: FakeLauncher) -> None:
        using = asyncio.create_task(_use(loader, "a", 10))
        await asyncio.sleep(5)
        loader.remove("a")
        loader.add(ModelEntry("a", SETTINGS))
        await _use(loader, "a")
        assert using.done()
        assert launcher.starts == ["a", "a"]

    _run(scenario)
