"""The offload tier: evicted content is loaded unchanged, within the budgets, after a restart too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvcache import offload, prefix
from kvcache.cache import Cache
from kvcache.disk import DiskFolder
from kvcache.offload import OffloadConfig, OffloadTier
from kvcache.prefix import PrefixCounts
from kvcache.spec import LayerSpec
from tests.kvcache.digests import CHUNK, FULL, WINDOW, check, feed, make, no_leak, recalled, remember, save_all

TEXT = tuple(range(100, 160))
KINDS = {
    "full": ((FULL,), None),
    "windows": ((FULL, WINDOW), None),
    "chunks": ((CHUNK, FULL), None),
    "hybrid": ((FULL, WINDOW), 10**6),
    "recurrent": ((), 10**6),
}
kinds = pytest.mark.parametrize(("layers", "state_bytes"), KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load and offload short ranges, in entries of a few tokens."""
    monkeypatch.setattr(prefix, "MIN_LOAD_TOKENS", 1)
    monkeypatch.setattr(prefix, "MIN_OFFLOAD_TOKENS", 4)
    monkeypatch.setattr(offload, "MAX_ENTRY_BYTES", 200)


def in_memory(size: int = 10**7) -> OffloadConfig:
    """A tier in memory alone."""
    return OffloadConfig(memory_bytes=size)


def on_disk(folder: Path, size: int = 10**7, *, identity: str = "model") -> OffloadConfig:
    """A tier of files alone."""
    return OffloadConfig(folder=folder, disk_bytes=size, identity=identity)


def build(layers: Sequence[LayerSpec], state_bytes: int | None, config: OffloadConfig) -> Cache:
    """A cache of a kind."""
    cache = make(*(layers or (FULL,)), state_bytes=state_bytes, shelf=config)
    return cache if layers else Cache((), slots=3, capacity=64, cells=192, state_bytes=state_bytes, offload=config)


@kinds
def test_evicted_prefixes_are_loaded_again(layers: Sequence[LayerSpec], state_bytes: int | None) -> None:
    cache = build(layers, state_bytes, in_memory())
    remember(cache, TEXT, seal=True)
    cache.reset_prefix_cache()

    assert cache.cells == cache.free_cells
    assert len(TEXT) == recalled(cache, TEXT)
    no_leak(cache)


@kinds
def test_written_prefixes_survive_the_process(
    layers: Sequence[LayerSpec], state_bytes: int | None, tmp_path: Path
) -> None:
    cache = build(layers, state_bytes, on_disk(tmp_path))
    other = (*TEXT[:40], 7, 8, 9, 10)
    remember(cache, TEXT[:40], seal=True)
    for text in (TEXT, other):
        remember(cache, text, seal=True)
    save_all(cache, 1000)
    again = build(layers, state_bytes, on_disk(tmp_path))

    for text in (other, TEXT, TEXT[:40]):
        assert len(text) == again._tree.match(np.asarray(text), b"").length
        assert len(text) == recalled(again, text)
    no_leak(again)


def test_cached_tokens_are_counted(tmp_path: Path) -> None:
    cache = make(FULL, WINDOW, shelf=on_disk(tmp_path))
    for length in (20, 60):
        remember(cache, TEXT[:length], seal=True)
    assert PrefixCounts() == cache.prefix_counts
    cache._tree.evict([0, 5])
    assert PrefixCounts(trimmed=40) == cache.prefix_counts
    cache.reset_prefix_cache()
    save_all(cache, 1000)
    assert PrefixCounts(trimmed=40, evicted=60, written=60) == cache.prefix_counts
    for _ in range(2):
        assert 20 == recalled(cache, TEXT[:30])

    assert PrefixCounts(trimmed=40, evicted=60, written=60, loaded=20) == cache.prefix_counts


@pytest.mark.parametrize("at", range(1, 60, 7))
def test_a_diverging_text_reuses_the_offloaded_prefix(at: int, tmp_path: Path) -> None:
    cache = make(FULL, shelf=on_disk(tmp_path))
    remember(cache, TEXT)
    save_all(cache, 1000)
    again = make(FULL, shelf=on_disk(tmp_path))

    assert at == recalled(again, (*TEXT[:at], 7, 7))
    assert len(TEXT) == recalled(again, TEXT)


def test_salts_do_not_share_offloaded_prefixes(tmp_path: Path) -> None:
    cache = make(FULL, shelf=on_disk(tmp_path))
    remember(cache, TEXT[:20], salt=b"one")
    remember(cache, TEXT[:30], salt=b"two")
    save_all(cache, 1000)
    again = make(FULL, shelf=on_disk(tmp_path))

    assert [20, 30, 0] == [recalled(again, TEXT, salt=salt) for salt in (b"one", b"two", b"")]


def test_offloaded_content_keeps_to_its_memory_budget() -> None:
    one = make(FULL, shelf=in_memory())
    remember(one, TEXT[:40])
    one.reset_prefix_cache()
    size = one.offloaded_bytes[0]
    cache = make(FULL, shelf=in_memory(size + size // 2))
    for first in (1, 2):
        remember(cache, (first, *TEXT[:39]))
    cache.reset_prefix_cache()

    assert size < cache.offloaded_bytes[0] <= size + size // 2
    assert 40 == recalled(cache, (2, *TEXT[:39]))
    assert 10 < recalled(cache, (1, *TEXT[:39])) < 30


def test_of_a_text_beyond_the_budget_the_start_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(FULL, shelf=in_memory(500))
    remember(cache, TEXT)
    fit, seen = OffloadTier.enforce_budgets, []
    monkeypatch.setattr(OffloadTier, "enforce_budgets", lambda self: (seen.append(self.memory_bytes), fit(self)))
    cache.reset_prefix_cache()

    assert 0 < max(seen) <= 500
    assert 0 < recalled(cache, TEXT) < len(TEXT)
    assert cache.offloaded_bytes[0] <= 500


def test_evicted_content_stays_in_memory_until_written(tmp_path: Path) -> None:
    cache = make(FULL, shelf=on_disk(tmp_path))
    remember(cache, TEXT)
    cache.reset_prefix_cache()

    assert (True, 0) == (cache.offloaded_bytes[0] > 0, cache.offloaded_bytes[1])
    save_all(cache, 1000)
    assert (0, True) == (cache.offloaded_bytes[0], cache.offloaded_bytes[1] > 0)
    assert len(TEXT) == recalled(cache, TEXT)
    assert len(TEXT) == recalled(make(FULL, shelf=on_disk(tmp_path)), TEXT)


def test_the_write_buffer_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "WRITE_BUFFER_BYTES", 500)
    for memory in (0, 800):
        cache = make(FULL, shelf=OffloadConfig(memory, tmp_path, 10**7, "model"))
        for first in (1, 2):
            remember(cache, (first, *TEXT))
        cache.reset_prefix_cache()

        assert 0 < cache.offloaded_bytes[0] <= max(memory, 500)
        assert [0, True] == [recalled(cache, (1, *TEXT)), recalled(cache, (2, *TEXT)) > 0]


def test_files_keep_to_their_budget(tmp_path: Path) -> None:
    cache = make(FULL, shelf=on_disk(tmp_path, 6000))
    for first in range(8):
        remember(cache, (first, *TEXT[:20]))
        save_all(cache, 1000)
        files = [file.stat().st_size for file in tmp_path.rglob("*.safetensors")]

        assert sum(files) == cache.offloaded_bytes[1] <= 6000
    again = make(FULL, shelf=on_disk(tmp_path, 6000))

    assert 21 == recalled(again, (7, *TEXT[:20]))
    assert 0 == recalled(again, (0, *TEXT[:20]))


def test_a_smaller_disk_budget_applies_from_the_start(tmp_path: Path) -> None:
    cache = make(FULL, shelf=on_disk(tmp_path))
    remember(cache, TEXT)
    save_all(cache, 1000)
    size = cache.offloaded_bytes[1]
    again = make(FULL, shelf=on_disk(tmp_path, size // 2))

    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) == again.offloaded_bytes[1] <= size // 2
    assert 0 < recalled(again, TEXT) < len(TEXT)


@pytest.mark.parametrize("older", [0, 1])
def test_times_of_use_survive_the_process(older: int, tmp_path: Path) -> None:
    cache = make(FULL, shelf=on_disk(tmp_path))
    texts, seen = [(first, *TEXT[:20]) for first in (1, 2)], set[Path]()
    for at, text in enumerate(texts):
        remember(cache, text)
        save_all(cache, 1000)
        files = set(tmp_path.rglob("*.safetensors")) - seen
        seen |= files
        for file in files:
            os.utime(file, (1000 + (at != older), 1000 + (at != older)))
    again = make(FULL, shelf=on_disk(tmp_path, cache.offloaded_bytes[1] - 1))

    assert 21 == recalled(again, texts[1 - older])
    assert recalled(again, texts[older]) < 21


def test_loading_evicts_other_paths_than_its_own() -> None:
    cache = make(FULL, slots=2, capacity=48, cells=64, shelf=in_memory())
    for first in (1, 2):
        remember(cache, (first, *TEXT[:39]))

    for first in (1, 2, 1, 2):
        assert 40 == recalled(cache, (first, *TEXT[:39]))
    feed(cache, 0, [5] * 40)
    for _ in range(2):
        assert 24 == recalled(cache, (1, *TEXT[:39]))
    check(cache, 0, [5] * 40)
    no_leak(cache)


def test_content_evicted_by_loading_is_offloaded() -> None:
    size = make(FULL, shelf=in_memory())
    remember(size, TEXT[:40])
    size.reset_prefix_cache()
    cache = make(FULL, slots=2, capacity=40, cells=40, shelf=in_memory(size.offloaded_bytes[0]))
    for first in (1, 2):
        remember(cache, (first, *TEXT[:39]))

    assert [40] * 4 == [recalled(cache, (first, *TEXT[:39])) for first in (1, 2, 1, 2)]


def test_few_tokens_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "MIN_LOAD_TOKENS", 16)
    cache = make(FULL, shelf=in_memory())
    remember(cache, TEXT)
    cache.reset_prefix_cache()

    assert 0 == recalled(cache, TEXT[:15])
    assert 16 == recalled(cache, TEXT[:16])


@pytest.mark.parametrize("kind", ["windows", "hybrid", "recurrent"])
def test_content_without_resume_point_is_not_loaded(kind: str) -> None:
    cache = build(*KINDS[kind], in_memory())
    remember(cache, TEXT[:30], seal=True)
    remember(cache, TEXT, seal=True)
    cache.reset_prefix_cache()
    shelved = cache.offloaded_bytes

    assert 0 == recalled(cache, TEXT[:29])
    assert (cache.cells, shelved) == (cache.free_cells, cache.offloaded_bytes)
    assert 30 == recalled(cache, TEXT[:59])
    assert cache.free_cells == (cache.cells - 30 if cache.groups else cache.cells)
    assert 60 == recalled(cache, TEXT)
    no_leak(cache)


def test_a_file_without_resume_point_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(FULL, WINDOW, shelf=on_disk(tmp_path))
    remember(cache, TEXT, seal=True)
    cache.reset_prefix_cache()
    save_all(cache, 1000)
    again, read, names = make(FULL, WINDOW, shelf=on_disk(tmp_path)), DiskFolder.read, list[str]()
    monkeypatch.setattr(DiskFolder, "read", lambda self, name: (names.append(name), read(self, name))[1])
    asked = []
    for length in (59, 59, 60):
        assert (60 if length == 60 else 0) == recalled(again, TEXT[:length])
        again.reset_prefix_cache()
        asked.append(len(names))

    assert [True, True] == [asked[0] > 0, asked[2] > asked[1]]
    assert asked[0] == asked[1]


def test_recomputed_content_replaces_offloaded_content(tmp_path: Path) -> None:
    cache = make(FULL, WINDOW, shelf=on_disk(tmp_path))
    remember(cache, TEXT[:20], seal=True)
    save_all(cache, 1000)
    cache.reset_prefix_cache()
    feed(cache, 0, TEXT[:30])
    cache.insert_prefix(0, TEXT[:30])

    assert 30 == cache.reuse_prefix(1, TEXT[:35])
    check(cache, 1, TEXT[:30])
    no_leak(cache)


def test_a_grown_leaf_is_written_from_its_last_entry_on(tmp_path: Path) -> None:
    cache = make(FULL, shelf=on_disk(tmp_path))
    for length in (20, 21, 40):
        remember(cache, TEXT[:length])
        save_all(cache, 1000)
    again = make(FULL, shelf=on_disk(tmp_path))

    assert not cache.flush_to_disk(10**9)
    assert 40 == recalled(again, TEXT)


def test_prefixes_are_written_first(tmp_path: Path) -> None:
    cache = make(FULL, shelf=on_disk(tmp_path))
    for text in (TEXT[:30], (*TEXT[:20], 1, 2, 3, 4), (9, 8, 7, 6)):
        remember(cache, text)
    more = True
    while more:
        more = cache.flush_to_disk(1)
        written = len(list(tmp_path.rglob("*.safetensors")))
        again = make(FULL, shelf=on_disk(tmp_path))

        assert written == len(list(tmp_path.rglob("*.safetensors")))
        assert again.offloaded_bytes == cache.offloaded_bytes


def test_filled_gaps_are_written_again(tmp_path: Path) -> None:
    cache = make(FULL, WINDOW, shelf=on_disk(tmp_path))
    remember(cache, TEXT)
    assert cache._tree.evict([0, len(TEXT) - 3])
    save_all(cache, 1000)
    assert 0 == recalled(cache, TEXT[:32])
    remember(cache, TEXT[:32], seal=True)
    save_all(cache, 1000)
    again = make(FULL, WINDOW, shelf=on_disk(tmp_path))

    assert 32 == recalled(again, TEXT[:35])
    assert len(TEXT) == recalled(again, TEXT)


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    one, two = (make(FULL, shelf=on_disk(tmp_path)) for _ in range(2))
    remember(one, TEXT)
    save_all(one, 1000)
    remember(two, TEXT)
    save_all(two, 1000)
    three = make(FULL, shelf=on_disk(tmp_path))
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()

    assert len(TEXT) == recalled(one, TEXT)
    assert 0 == recalled(three, TEXT)
    remember(three, TEXT)
    save_all(three, 1000)
    assert len(TEXT) == recalled(make(FULL, shelf=on_disk(tmp_path)), TEXT)
