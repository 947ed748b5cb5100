"""Which adapters are loaded: limits, users, the order of eviction, and requests that wait for memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch

from engine.adapters.adapter import Adapter, LowRank
from engine.adapters.catalog import AdapterCatalog, AdapterLimits
from engine.adapters.checkpoint import WEIGHTS_FILE
from engine.adapters.config import CONFIG_FILE
from engine.adapters.folder import AdapterFolder
from engine.errors import (
    AdapterLoaded,
    AdapterPathRefused,
    AdaptersFull,
    AdapterUnknown,
    AdapterUnsupported,
    Draining,
    InvalidRequest,
)

SIZE = 4 * 8


class Adapters:
    """A catalog of a folder with empty adapters of SIZE bytes, and the commands that it sent."""

    def __init__(self, root: Path, *, count: int = 2, bytes: int = 100 * SIZE, start: tuple[str, ...] = ()) -> None:
        self.commands: list[str] = []
        self.versions = 0
        self.gate: asyncio.Event | None = None
        self.catalog = AdapterCatalog(
            [adapter(name).info for name in start],
            AdapterLimits(count, bytes),
            AdapterFolder(str(root)),
            read=self.read,
            load=lambda loaded: self.commands.append(f"+{loaded.name}"),
            unload=lambda name: self.commands.append(f"-{name}"),
        )

    def read(self, name: str, path: Path) -> Adapter:
        if "broken" in path.name:
            raise AdapterUnsupported(name, "broken")
        self.versions += 1
        return adapter(name, f"digest{self.versions}")

    @property
    def names(self) -> list[str]:
        return [info.name for info in self.catalog.infos]


def adapter(name: str, digest: str = "digest") -> Adapter:
    return Adapter(name, digest, {"proj": LowRank(torch.ones(1, 4), torch.ones(4, 1))})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with adapters a to e, a nested one and a broken one; links that leave it, and one that does not."""
    folder = tmp_path / "adapters"
    for name in (*"abcde", "org/nested", "broken", "../outside"):
        (folder / name).mkdir(parents=True)
        (folder / name / CONFIG_FILE).write_text("{}")
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "alias").symlink_to(folder / "a")
    return folder


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def scene() -> None:
        async with asyncio.timeout(10):
            await story()

    asyncio.run(scene())


async def settle() -> None:
    """Until all tasks wait."""
    for _ in range(20):
        await asyncio.sleep(0.002)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../outside", "/etc", "a/../b", "a//b", "none", "link", "x\0y", "x" * 5000, "a/", "org"]
)
def test_names_of_the_folder_never_leave_it(root: Path, name: str) -> None:
    """No adapter has them."""
    assert AdapterFolder(str(root)).find(name) is None


@pytest.mark.parametrize("file", [f"a/{WEIGHTS_FILE}", "large.gguf"])
def test_a_file_that_cannot_fit_is_not_read(root: Path, file: str) -> None:
    """Neither by a call nor by a request; a smaller one is."""

    async def story() -> None:
        adapters = Adapters(root, bytes=2 * SIZE)
        name, path = file.removesuffix(f"/{WEIGHTS_FILE}").removesuffix(".gguf"), root / file
        with path.open("wb") as large:
            large.truncate(4 * SIZE + 2)
        with pytest.raises(AdaptersFull, match="lora-memory"):
            await adapters.catalog.load("mine", str(path.parent if name == "a" else path), in_place=False)
        with pytest.raises(AdaptersFull):
            async with adapters.catalog.hold(name):
                raise AssertionError("it does not fit")
        assert adapters.versions == 0
        with path.open("wb") as smaller:
            smaller.truncate(4 * SIZE)
        async with adapters.catalog.hold(name):
            assert adapters.names == [name]

    run(story)


def test_names_of_the_folder_are_subfolders(root: Path) -> None:
    """At any depth, and links within the folder."""
    folder = AdapterFolder(str(root))

    assert [folder.find(name) for name in ("a", "org/nested", "alias")] == [
        root / "a",
        root / "org/nested",
        root / "alias",
    ]


@pytest.mark.parametrize(
    "path", ["..", ".", "", "../outside", "link", "/etc/passwd", "a/../../outside", "x\0y", "../adapters"]
)
def test_paths_outside_are_refused(root: Path, path: str) -> None:
    """Also by a link."""
    with pytest.raises(AdapterPathRefused):
        AdapterFolder(str(root)).resolve(path)


def test_paths_are_relative_or_absolute(root: Path) -> None:
    folder = AdapterFolder(str(root))

    assert folder.resolve("a") == folder.resolve(str(root / "a")) == folder.resolve("b/../a") == root / "a"


def test_a_call_loads_and_unloads(root: Path) -> None:
    """Under any name; a loaded name is refused unless it is to be replaced."""

    async def story() -> None:
        adapters = Adapters(root, start=("first",))
        catalog = adapters.catalog
        await catalog.load("mine", "a", in_place=False)
        with pytest.raises(AdapterLoaded):
            await catalog.load("mine", "b", in_place=False)
        with pytest.raises(AdapterLoaded):
            await catalog.load("first", "b", in_place=False)
        with pytest.raises(AdapterPathRefused):
            await catalog.load("other", "../outside", in_place=False)
        with pytest.raises(AdapterUnsupported):
            await catalog.load("mine", "broken", in_place=True)
        assert (adapters.names, catalog.infos[1].digest) == (["first", "mine"], "digest1")
        await catalog.load("mine", "b", in_place=True)
        assert (adapters.names, catalog.infos[1].digest, catalog.bytes) == (["first", "mine"], "digest2", SIZE)
        for name in ("mine", "first"):
            catalog.unload(name)
            with pytest.raises(AdapterUnknown):
                catalog.unload(name)
            with pytest.raises(InvalidRequest):
                catalog.check(name)
        assert adapters.commands == ["+mine", "+mine", "-mine", "-first"]
        assert catalog.bytes == 0

    run(story)


@pytest.mark.parametrize(("count", "bytes"), [(2, 100 * SIZE), (100, 2 * SIZE + 1)])
def test_calls_are_refused_above_the_limits(root: Path, count: int, bytes: int) -> None:
    """With the numbers; adapters of requests give way, those in use and of other calls do not."""

    async def story() -> None:
        adapters = Adapters(root, count=count, bytes=bytes, start=("first",))
        catalog = adapters.catalog
        async with catalog.hold("e"):
            await catalog.load("x", "a", in_place=False)
            with pytest.raises(AdaptersFull, match=r"needs 32 bytes; 2 of \d+ adapters .* 64 bytes of"):
                await catalog.load("y", "b", in_place=False)
        assert adapters.names == ["first", "e", "x"]
        await catalog.load("y", "b", in_place=False)
        assert adapters.commands == ["+e", "+x", "-e", "+y"]
        with pytest.raises(AdaptersFull):
            async with catalog.hold("c"):
                pass
        # The memory of an idle adapter is that of the new version.
        await catalog.load("y", "c", in_place=True)
        async with catalog.hold("y"):
            with pytest.raises(AdaptersFull):
                await catalog.load("y", "c", in_place=True)

    run(story)


def test_an_unloaded_adapter_has_memory_until_its_last_request_ends(root: Path) -> None:
    """Its name is free at once."""

    async def story() -> None:
        catalog = Adapters(root, count=1).catalog
        await catalog.load("x", "a", in_place=False)
        async with catalog.hold("x"):
            catalog.unload("x")
            assert (catalog.has("x"), catalog.bytes) == (False, SIZE)
            with pytest.raises(AdaptersFull):
                await catalog.load("x", "a", in_place=False)
        assert catalog.bytes == 0
        await catalog.load("x", "a", in_place=False)

    run(story)


def test_the_least_recently_used_adapter_gives_way(root: Path) -> None:
    """Of those that requests loaded."""

    async def story() -> None:
        adapters = Adapters(root, count=3)
        for name in "abcad":
            async with adapters.catalog.hold(name):
                pass
        assert adapters.commands == ["+a", "+b", "+c", "-b", "+d"]
        for name in ("broken", "none"):
            with pytest.raises((AdapterUnsupported, InvalidRequest)):
                async with adapters.catalog.hold(name):
                    pass
        assert adapters.names == ["a", "c", "d"]

    run(story)


def test_requests_wait_for_memory_in_order(root: Path) -> None:
    """Later requests to the adapter that gives way do not overtake them."""

    async def story() -> None:
        adapters, order = Adapters(root, count=2), list[str]()

        async def use(name: str, seconds: float) -> None:
            async with adapters.catalog.hold(name):
                order.append(name)
                await asyncio.sleep(seconds)

        async with AsyncExitStack() as a, AsyncExitStack() as b:
            await a.enter_async_context(adapters.catalog.hold("a"))
            await b.enter_async_context(adapters.catalog.hold("b"))
            waiting = [asyncio.create_task(use(name, 0.01)) for name in ("c", "d")]
            await settle()
            waiting += [asyncio.create_task(use(name, 0.01)) for name in ("a", "b")]
            await settle()
            # b does not give way, so its requests do not wait.
            assert order == ["b"]
            await a.aclose()
            await asyncio.gather(*waiting)
        assert order[:2] == ["b", "c"]
        assert sorted(order) == ["a", "b", "c", "d"]
        assert len(adapters.names) == 2

    run(story)


def test_waiting_ends_with_the_server_and_with_the_client(root: Path) -> None:
    """Others are not affected."""

    async def story() -> None:
        adapters = Adapters(root, count=1)

        async def use(name: str) -> None:
            async with adapters.catalog.hold(name):
                pass

        async with adapters.catalog.hold("a"):
            leaving, staying = asyncio.create_task(use("b")), asyncio.create_task(use("c"))
            await settle()
            leaving.cancel()
            await settle()
            assert leaving.cancelled()
            assert not staying.done()
            adapters.catalog.close()
            with pytest.raises(Draining):
                await staying
        assert adapters.names == ["a"]

    run(story)


def test_one_read_serves_all_first_requests(root: Path) -> None:
    """Ten at once."""

    async def story() -> None:
        adapters = Adapters(root)

        async def use() -> None:
            async with adapters.catalog.hold("a"):
                await asyncio.sleep(0.01)

        await asyncio.gather(*(use() for _ in range(10)))
        assert (adapters.versions, adapters.commands) == (1, ["+a"])

    run(story)
