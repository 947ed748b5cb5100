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
from tests.kvcache.digests import (
    CHUNK,
    FULL,
    WINDOW,
    check,
    check_references,
    compute_and_insert,
    feed,
    flush_all,
    make,
    reused_length,
)

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
    cache = make(*(layers or (FULL,)), state_bytes=state_bytes, offload=config)
    return cache if layers else Cache((), slots=3, capacity=64, cells=192, state_bytes=state_bytes, offload=config)


@kinds
def test_evicted_prefixes_are_loaded_again(layers: Sequence[LayerSpec], state_bytes: int | None) -> None:
    cache = build(layers, state_bytes, in_memory())
    compute_and_insert(cache, TEXT, checkpoint=True)
    cache.reset_prefix_cache()

    assert cache.cells == cache.free_cells
    assert len(TEXT) == reused_length(cache, TEXT)
    check_references(cache)


@kinds
def test_written_prefixes_survive_the_process(
    layers: Sequence[LayerSpec], state_bytes: int | None, tmp_path: Path
) -> None:
    cache = build(layers, state_bytes, on_disk(tmp_path))
    other = (*TEXT[:40], 7, 8, 9, 10)
    compute_and_insert(cache, TEXT[:40], checkpoint=True)
    for text in (TEXT, other):
        compute_and_insert(cache, text, checkpoint=True)
    flush_all(cache, 1000)
    reopened = build(layers, state_bytes, on_disk(tmp_path))

    for text in (other, TEXT, TEXT[:40]):
        assert len(text) == reopened._tree.match(np.asarray(text), b"").length
        assert len(text) == reused_length(reopened, text)
    check_references(reopened)


def test_cached_tokens_are_counted(tmp_path: Path) -> None:
    cache = make(FULL, WINDOW, offload=on_disk(tmp_path))
    for length in (20, 60):
        compute_and_insert(cache, TEXT[:length], checkpoint=True)
    assert PrefixCounts() == cache.prefix_counts
    cache._tree.evict([0, 5])
    assert PrefixCounts(trimmed=40) == cache.prefix_counts
    cache.reset_prefix_cache()
    flush_all(cache, 1000)
    assert PrefixCounts(trimmed=40, evicted=60, written=60) == cache.prefix_counts
    for _ in range(2):
        assert 20 == reused_length(cache, TEXT[:30])

    assert PrefixCounts(trimmed=40, evicted=60, written=60, loaded=20) == cache.prefix_counts


@pytest.mark.parametrize("at", range(1, 60, 7))
def test_a_diverging_text_reuses_the_offloaded_prefix(at: int, tmp_path: Path) -> None:
    cache = make(FULL, offload=on_disk(tmp_path))
    compute_and_insert(cache, TEXT)
    flush_all(cache, 1000)
    reopened = make(FULL, offload=on_disk(tmp_path))

    assert at == reused_length(reopened, (*TEXT[:at], 7, 7))
    assert len(TEXT) == reused_length(reopened, TEXT)


def test_salts_do_not_share_offloaded_prefixes(tmp_path: Path) -> None:
    cache = make(FULL, offload=on_disk(tmp_path))
    compute_and_insert(cache, TEXT[:20], salt=b"one")
    compute_and_insert(cache, TEXT[:30], salt=b"two")
    flush_all(cache, 1000)
    reopened = make(FULL, offload=on_disk(tmp_path))

    assert [20, 30, 0] == [reused_length(reopened, TEXT, salt=salt) for salt in (b"one", b"two", b"")]


def test_offloaded_content_keeps_to_its_memory_budget() -> None:
    one = make(FULL, offload=in_memory())
    compute_and_insert(one, TEXT[:40])
    one.reset_prefix_cache()
    size = one.offloaded_bytes[0]
    cache = make(FULL, offload=in_memory(size + size // 2))
    for first in (1, 2):
        compute_and_insert(cache, (first, *TEXT[:39]))
    cache.reset_prefix_cache()

    assert size < cache.offloaded_bytes[0] <= size + size // 2
    assert 40 == reused_length(cache, (2, *TEXT[:39]))
    assert 10 < reused_length(cache, (1, *TEXT[:39])) < 30


def test_of_a_text_beyond_the_budget_the_start_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(FULL, offload=in_memory(500))
    compute_and_insert(cache, TEXT)
    fit, seen = OffloadTier.enforce_budgets, []
    monkeypatch.setattr(OffloadTier, "enforce_budgets", lambda self: (seen.append(self.memory_bytes), fit(self)))
    cache.reset_prefix_cache()

    assert 0 < max(seen) <= 500
    assert 0 < reused_length(cache, TEXT) < len(TEXT)
    assert cache.offloaded_bytes[0] <= 500


def test_evicted_content_stays_in_memory_until_written(tmp_path: Path) -> None:
    cache = make(FULL, offload=on_disk(tmp_path))
    compute_and_insert(cache, TEXT)
    cache.reset_prefix_cache()

    assert (True, 0) == (cache.offloaded_bytes[0] > 0, cache.offloaded_bytes[1])
    flush_all(cache, 1000)
    assert (0, True) == (cache.offloaded_bytes[0], cache.offloaded_bytes[1] > 0)
    assert len(TEXT) == reused_length(cache, TEXT)
    assert len(TEXT) == reused_length(make(FULL, offload=on_disk(tmp_path)), TEXT)


def test_the_write_buffer_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "WRITE_BUFFER_BYTES", 500)
    for memory in (0, 800):
        cache = make(FULL, offload=OffloadConfig(memory, tmp_path, 10**7, "model"))
        for first in (1, 2):
            compute_and_insert(cache, (first, *TEXT))
        cache.reset_prefix_cache()

        assert 0 < cache.offloaded_bytes[0] <= max(memory, 500)
        assert [0, True] == [reused_length(cache, (1, *TEXT)), reused_length(cache, (2, *TEXT)) > 0]


def test_files_keep_to_their_budget(tmp_path: Path) -> None:
    cache = make(FULL, offload=on_disk(tmp_path, 6000))
    for first in range(8):
        compute_and_insert(cache, (first, *TEXT[:20]))
        flush_all(cache, 1000)
        files = [file.stat().st_size for file in tmp_path.rglob("*.safetensors")]

        assert sum(files) == cache.offloaded_bytes[1] <= 6000
    reopened = make(FULL, offload=on_disk(tmp_path, 6000))

    assert 21 == reused_length(reopened, (7, *TEXT[:20]))
    assert 0 == reused_length(reopened, (0, *TEXT[:20]))


def test_a_smaller_disk_budget_applies_from_the_start(tmp_path: Path) -> None:
    cache = make(FULL, offload=on_disk(tmp_path))
    compute_and_insert(cache, TEXT)
    flush_all(cache, 1000)
    size = cache.offloaded_bytes[1]
    reopened = make(FULL, offload=on_disk(tmp_path, size // 2))

    assert (
        sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) == reopened.offloaded_bytes[1] <= size // 2
    )
    assert 0 < reused_length(reopened, TEXT) < len(TEXT)


@pytest.mark.parametrize("older", [0, 1])
def test_times_of_use_survive_the_process(older: int, tmp_path: Path) -> None:
    cache = make(FULL, offload=on_disk(tmp_path))
    texts, seen = [(first, *TEXT[:20]) for first in (1, 2)], set[Path]()
    for at, text in enumerate(texts):
        compute_and_insert(cache, text)
        flush_all(cache, 1000)
        files = set(tmp_path.rglob("*.safetensors")) - seen
        seen |= files
        for file in files:
            os.utime(file, (1000 + (at != older), 1000 + (at != older)))
    reopened = make(FULL, offload=on_disk(tmp_path, cache.offloaded_bytes[1] - 1))

    assert 21 == reused_length(reopened, texts[1 - older])
    assert reused_length(reopened, texts[older]) < 21


def test_loading_evicts_other_paths_than_its_own() -> None:
    cache = make(FULL, slots=2, capacity=48, cells=64, offload=in_memory())
    for first in (1, 2):
        compute_and_insert(cache, (first, *TEXT[:39]))

    for first in (1, 2, 1, 2):
        assert 40 == reused_length(cache, (first, *TEXT[:39]))
    feed(cache, 0, [5] * 40)
    for _ in range(2):
        assert 24 == reused_length(cache, (1, *TEXT[:39]))
    check(cache, 0, [5] * 40)
    check_references(cache)


def test_content_evicted_by_loading_is_offloaded() -> None:
    size = make(FULL, offload=in_memory())
    compute_and_insert(size, TEXT[:40])
    size.reset_prefix_cache()
    cache = make(FULL, slots=2, capacity=40, cells=40, offload=in_memory(size.offloaded_bytes[0]))
    for first in (1, 2):
        compute_and_insert(cache, (first, *TEXT[:39]))

    assert [40] * 4 == [reused_length(cache, (first, *TEXT[:39])) for first in (1, 2, 1, 2)]


def test_few_tokens_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "MIN_LOAD_TOKENS", 16)
    cache = make(FULL, offload=in_memory())
    compute_and_insert(cache, TEXT)
    cache.reset_prefix_cache()

    assert 0 == reused_length(cache, TEXT[:15])
    assert 16 == reused_length(cache, TEXT[:16])


@pytest.mark.parametrize("kind", ["windows", "hybrid", "recurrent"])
def test_content_without_resume_point_is_not_loaded(kind: str) -> None:
    cache = build(*KINDS[kind], in_memory())
    compute_and_insert(cache, TEXT[:30], checkpoint=True)
    compute_and_insert(cache, TEXT, checkpoint=True)
    cache.reset_prefix_cache()
    offloaded = cache.offloaded_bytes

    assert 0 == reused_length(cache, TEXT[:29])
    assert (cache.cells, offloaded) == (cache.free_cells, cache.offloaded_bytes)
    assert 30 == reused_length(cache, TEXT[:59])
    assert cache.free_cells == (cache.cells - 30 if cache.groups else cache.cells)
    assert 60 == reused_length(cache, TEXT)
    check_references(cache)


def test_a_file_without_resume_point_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(FULL, WINDOW, offload=on_disk(tmp_path))
    compute_and_insert(cache, TEXT, checkpoint=True)
    cache.reset_prefix_cache()
    flush_all(cache, 1000)
    reopened, read, names = make(FULL, WINDOW, offload=on_disk(tmp_path)), DiskFolder.read, list[str]()
    monkeypatch.setattr(DiskFolder, "read", lambda self, name: (names.append(name), read(self, name))[1])
    asked = []
    for length in (59, 59, 60):
        assert (60 if length == 60 else 0) == reused_length(reopened, TEXT[:length])
        reopened.reset_prefix_cache()
        asked.append(len(names))

    assert [True, True] == [asked[0] > 0, asked[2] > asked[1]]
    assert asked[0] == asked[1]


def test_recomputed_content_replaces_offloaded_content(tmp_path: Path) -> None:
    cache = make(FULL, WINDOW, offload=on_disk(tmp_path))
    compute_and_insert(cache, TEXT[:20], checkpoint=True)
    flush_all(cache, 1000)
    cache.reset_prefix_cache()
    feed(cache, 0, TEXT[:30])
    cache.insert_prefix(0, TEXT[:30])

    assert 30 == cache.reuse_prefix(1, TEXT[:35])
    check(cache, 1, TEXT[:30])
    check_references(cache)


def test_a_grown_leaf_is_written_from_its_last_entry_on(tmp_path: Path) -> None:
    cache = make(FULL, offload=on_disk(tmp_path))
    for length in (20, 21, 40):
        compute_and_insert(cache, TEXT[:length])
        flush_all(cache, 1000)
    reopened = make(FULL, offload=on_disk(tmp_path))

    assert not cache.flush_to_disk(10**9)
    assert 40 == reused_length(reopened, TEXT)


def test_prefixes_are_written_first(tmp_path: Path) -> None:
    cache = make(FULL, offload=on_disk(tmp_path))
    for text in (TEXT[:30], (*TEXT[:20], 1, 2, 3, 4), (9, 8, 7, 6)):
        compute_and_insert(cache, text)
    more = True
    while more:
        more = cache.flush_to_disk(1)
        written = len(list(tmp_path.rglob("*.safetensors")))
        reopened = make(FULL, offload=on_disk(tmp_path))

        assert written == len(list(tmp_path.rglob("*.safetensors")))
        assert reopened.offloaded_bytes == cache.offloaded_bytes


def test_filled_gaps_are_written_again(tmp_path: Path) -> None:
    cache = make(FULL, WINDOW, offload=on_disk(tmp_path))
    compute_and_insert(cache, TEXT)
    assert cache._tree.evict([0, len(TEXT) - 3])
    flush_all(cache, 1000)
    assert 0 == reused_length(cache, TEXT[:32])
    compute_and_insert(cache, TEXT[:32], checkpoint=True)
    flush_all(cache, 1000)
    reopened = make(FULL, WINDOW, offload=on_disk(tmp_path))

    assert 32 == reused_length(reopened, TEXT[:35])
    assert len(TEXT) == reused_length(reopened, TEXT)


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    one, two = (make(FULL, offload=on_disk(tmp_path)) for _ in range(2))
    compute_and_insert(one, TEXT)
    flush_all(one, 1000)
    compute_and_insert(two, TEXT)
    flush_all(two, 1000)
    three = make(FULL, offload=on_disk(tmp_path))
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()

    assert len(TEXT) == reused_length(one, TEXT)
    assert 0 == reused_length(three, TEXT)
    compute_and_insert(three, TEXT)
    flush_all(three, 1000)
    assert len(TEXT) == reused_length(make(FULL, offload=on_disk(tmp_path)), TEXT)


def test_the_content_of_a_salt_is_removed_from_cells_memory_and_files(tmp_path: Path) -> None:
    """Other salts and slots keep theirs."""
    cache = make(FULL, WINDOW, offload=on_disk(tmp_path))
    for salt in (b"removed", b"kept"):
        compute_and_insert(cache, TEXT, salt=salt)
        cache.reset_prefix_cache()
        flush_all(cache, 1000)
        compute_and_insert(cache, (*TEXT[:10], 1, 2, 3), salt=salt)
    nodes = cache._tree.node_count
    cache.remove_prefixes(b"removed")
    cache.remove_prefixes(b"unknown")

    assert 2 * cache._tree.node_count == nodes
    assert 0 == reused_length(cache, TEXT, salt=b"removed")
    assert len(TEXT) == reused_length(cache, TEXT, salt=b"kept")
    cache.reset_prefix_cache()
    assert all(group.pool.cells == group.pool.free_cells for group in cache.groups)
    flush_all(cache, 1000)
    reopened = make(FULL, WINDOW, offload=on_disk(tmp_path))
    assert 0 == reused_length(reopened, TEXT, salt=b"removed")
    assert len(TEXT) == reused_length(reopened, TEXT, salt=b"kept")
