"""What stays in the offload tier when not all fits: most recently used content, after a restart too."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvcache import prefix
from kvcache.cache import Cache
from kvcache.component import SavedTensors
from kvcache.disk import DiskFolder, FileHeader
from kvcache.file_order import FileOrder
from kvcache.node import OffloadEntry
from kvcache.offload import OffloadConfig
from tests.kvcache.digests import FULL, WINDOW, compute_and_insert, flush_all, make, reused_length
from tests.kvcache.test_offload import TEXT, in_memory, on_disk, small

__all__ = ["small"]


def size_on_disk(*texts: Sequence[int], folder: Path) -> int:
    """The size of the files of some texts."""
    cache = make(FULL, offload=on_disk(folder))
    for text in texts:
        compute_and_insert(cache, text)
    flush_all(cache, 1000)
    return cache.offloaded_bytes[1]


def test_a_write_never_deletes_a_file_used_later(tmp_path: Path) -> None:
    old, new = (1, *TEXT[:20]), (2, *TEXT[:20])
    cache = make(FULL, offload=on_disk(tmp_path, size_on_disk(new, folder=tmp_path / "size")))
    compute_and_insert(cache, new)
    flush_all(cache, 1000)
    compute_and_insert(cache, old)
    assert 21 == reused_length(cache, new)
    flush_all(cache, 1000)

    assert 21 == reused_length(make(FULL, offload=on_disk(tmp_path)), new)


def test_a_full_disk_is_retried_after_another_use_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = DiskFolder.encode

    def counted(self: DiskFolder, references: FileHeader, content: Sequence[SavedTensors]) -> bytes:
        encoded.append(references.start)
        return encode(self, references, content)

    cache = make(FULL, offload=on_disk(tmp_path, 100))
    compute_and_insert(cache, TEXT)
    monkeypatch.setattr(DiskFolder, "encode", counted)
    for _ in range(3):
        assert not cache.flush_to_disk(10**9)
    assert [0] == encoded
    assert len(TEXT) == reused_length(cache, TEXT)
    assert not cache.flush_to_disk(10**9)

    assert [0, 0] == encoded


def test_a_write_looks_at_no_more_files_than_it_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of files, with a full folder and with free space in it."""
    seen: list[OffloadEntry] = []
    every = FileOrder.__iter__

    def counted(self: FileOrder) -> Iterator[OffloadEntry]:
        for entry in every(self):
            seen.append(entry)
            yield entry

    cache = make(FULL, offload=on_disk(tmp_path))
    monkeypatch.setattr(FileOrder, "__iter__", counted)
    for first in range(40):
        compute_and_insert(cache, (first, *TEXT[:20]))
        flush_all(cache, 1000)
    assert not seen
    budget = cache.offloaded_bytes[1]
    full = make(FULL, offload=on_disk(tmp_path, budget))
    for first in range(40, 60):
        compute_and_insert(full, (first, *TEXT[:20]))
        flush_all(full, 1000)

    assert 0 < len(seen) <= 5 * 20
    assert full.offloaded_bytes[1] <= budget
    reopened = make(FULL, offload=on_disk(tmp_path))
    kept = [first for first in range(60) if reused_length(reopened, (first, *TEXT[:20]))]
    assert kept[-38:] == list(range(60 - 38, 60))


def test_a_flush_ends_before_an_entry_that_may_exceed_its_budget(tmp_path: Path) -> None:
    """One entry is always written."""
    cache = make(FULL, offload=on_disk(tmp_path))
    for first in range(10):
        compute_and_insert(cache, (first, *TEXT[:20]))
    cache._tree.offload._token_bytes = 10**6
    entries = [cache.flush_to_disk(budget) for budget in (1, 10**6, 2 * 10**6)]
    written = cache.flush_to_disk(10**9)

    assert 0 < max(entries) < written
    assert sum(entries) + written == cache.offloaded_bytes[1]
    assert not cache.flush_to_disk(10**9)


def test_checkpoints_survive_the_process(tmp_path: Path) -> None:
    cache = make(FULL, WINDOW, offload=on_disk(tmp_path))
    compute_and_insert(cache, TEXT[:20], checkpoint=True)
    flush_all(cache, 1000)
    reopened = make(FULL, WINDOW, offload=on_disk(tmp_path))
    assert 1 == reopened._tree.node_count
    compute_and_insert(reopened, TEXT)
    assert 2 == reopened._tree.node_count
    reopened._tree.evict([0, len(TEXT)])

    assert 20 == reused_length(reopened, TEXT[:30])


def test_after_a_restart_the_oldest_files_are_deleted_first(tmp_path: Path) -> None:
    texts = [(first, *TEXT[:20]) for first in (1, 2, 3)]
    for older in (0, 1):
        folder, seen = tmp_path / str(older), set[Path]()
        cache = make(FULL, offload=on_disk(folder))
        for at, text in enumerate(texts[:2]):
            compute_and_insert(cache, text)
            flush_all(cache, 1000)
            for file in set(folder.rglob("*.safetensors")) - seen:
                os.utime(file, (1000 + (at != older), 1000 + (at != older)))
                seen.add(file)
        reopened = make(FULL, offload=on_disk(folder, cache.offloaded_bytes[1]))
        compute_and_insert(reopened, texts[2])
        flush_all(reopened, 1000)
        last = make(FULL, offload=on_disk(folder))

        assert [21, 21, 0] == [reused_length(last, text) for text in (texts[2], texts[1 - older], texts[older])]


def match_only(cache: Cache, text: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Match an offloaded text without loading it."""
    with monkeypatch.context() as patch:
        patch.setattr(prefix, "MIN_LOAD_TOKENS", 1000)
        assert 0 == reused_length(cache, text)


def test_matched_content_counts_as_used_without_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [(first, *TEXT[:20]) for first in (1, 2, 3)]
    one = make(FULL, offload=in_memory())
    compute_and_insert(one, texts[0])
    one.reset_prefix_cache()
    cache = make(FULL, offload=in_memory(2 * one.offloaded_bytes[0]))
    for text in texts[:2]:
        compute_and_insert(cache, text)
        cache.reset_prefix_cache()
    match_only(cache, texts[0], monkeypatch)
    compute_and_insert(cache, texts[2])
    cache.reset_prefix_cache()

    assert [21, 0] == [cache._tree.match(np.asarray(text), b"").length for text in texts[:2]]


def test_a_pruned_prefix_is_written_before_its_children(tmp_path: Path) -> None:
    cache = make(FULL, offload=on_disk(tmp_path))
    for length in (20, 40, 60):
        compute_and_insert(cache, TEXT[:length], checkpoint=True)
    assert 5 == cache.evict(5)
    while cache.flush_to_disk(1):
        reopened = make(FULL, offload=on_disk(tmp_path))

        assert reopened.offloaded_bytes[1] == cache.offloaded_bytes[1]


def test_content_with_a_lost_file_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [(first, *TEXT[:20]) for first in (1, 2)]
    size = size_on_disk(texts[0], folder=tmp_path / "size")
    cache = make(FULL, offload=OffloadConfig(10**7, tmp_path, size, "model"))
    for text in texts:
        compute_and_insert(cache, text)
        cache.reset_prefix_cache()
        flush_all(cache, 1000)
    match_only(cache, texts[0], monkeypatch)
    flush_all(cache, 1000)

    assert 21 == reused_length(make(FULL, offload=on_disk(tmp_path)), texts[0])


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    cache = make(FULL, offload=on_disk(tmp_path / "here"))
    compute_and_insert(cache, TEXT[:20])
    flush_all(cache, 1000)
    found = make(FULL, offload=on_disk(tmp_path / "here"))
    for file in list((tmp_path / "here").rglob("*.safetensors")):
        file.rename(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)

    assert 0 == reused_length(found, TEXT[:20])
    assert 0 == reused_length(make(FULL, offload=on_disk(tmp_path / "here")), TEXT[:20])
