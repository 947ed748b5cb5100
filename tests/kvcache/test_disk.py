"""Damage to files of the disk cache: outputs are the same as without the files, and no request fails."""

from __future__ import annotations

import os
import random
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcache import disk, offload, prefix
from kvcache.cache import Cache
from kvcache.disk import DiskFolder, FileHeader, InvalidFile
from kvcache.offload import OffloadConfig
from tests.kvcache.digests import FULL, WINDOW, check_references, compute_and_insert, flush_all, make, reused_length

TEXT = tuple(range(100, 140))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load and write short ranges, in entries of a few tokens."""
    monkeypatch.setattr(prefix, "MIN_LOAD_TOKENS", 1)
    monkeypatch.setattr(offload, "MAX_ENTRY_BYTES", 1000)


class Reports(list[str]):
    """Collects the reports of the offload tier."""

    def config(self, folder: Path, *, identity: str = "model") -> OffloadConfig:
        """A configuration with files that reports here."""
        return OffloadConfig(folder=folder, disk_bytes=10**7, identity=identity, report=self.append)


def opened(folder: Path, reports: Reports | None = None, *, identity: str = "model") -> Cache:
    """A hybrid cache over a folder."""
    config = (Reports() if reports is None else reports).config(folder, identity=identity)
    return make(FULL, WINDOW, state_bytes=10**6, offload=config)


def files(folder: Path) -> list[Path]:
    """The files of the folder, by name."""
    return sorted(folder.rglob("*.safetensors"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two saved texts that share a prefix."""
    folder = tmp_path_factory.mktemp("offload")
    cache = opened(folder)
    for text in (TEXT[:30], (*TEXT[:15], 7, 7, 7, 7, 7)):
        compute_and_insert(cache, text, checkpoint=True)
    flush_all(cache)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of the folder."""
    return Path(shutil.copytree(written, tmp_path / "offload"))


def flips(count: int, written: Path, folder: Path) -> Iterator[tuple[Path, int]]:
    """An endless sequence of files and bits to flip."""
    draw = random.Random(count)
    for _ in range(count):
        file = draw.choice(files(written))
        data = bytearray(file.read_bytes())
        bit = draw.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        target = folder / file.relative_to(written)
        target.write_bytes(data)
        yield target, bit
        shutil.copy(file, target)


def check_flips(count: int, written: Path, folder: Path) -> None:
    """Flip `count` bits in turn; no damaged file may be read, nor used by a cache."""
    name = files(folder)[0].parent
    for turn, (file, bit) in enumerate(flips(count, written, folder)):
        single = DiskFolder(folder, "model")
        with pytest.raises(InvalidFile):
            single.read(file.name)
        if turn % 50 == 0:
            kept = {path: path.read_bytes() for path in files(folder)}
            cache = opened(folder)
            for text in (TEXT[:30], (*TEXT[:15], 7, 7, 7, 7, 7)):
                assert reused_length(cache, text) <= len(text), f"bit {bit}"
            assert not file.exists()
            check_references(cache)
            for path, data in kept.items():
                path.write_bytes(data)
    assert name.exists()


def test_written_files_are_read_back(folder: Path) -> None:
    assert 30 == reused_length(opened(folder), TEXT[:30])
    assert 20 == reused_length(opened(folder), (*TEXT[:15], 7, 7, 7, 7, 7))


def test_keys_of_64_bits_are_read_back(tmp_path: Path) -> None:
    """As bidirectional ranges have them: negative, and derived from all tokens of the range."""
    keys = (*TEXT[:6], *(-(2**62) - 2**33 * at - 5 for at in range(8)), *TEXT[6:12])
    cache = opened(tmp_path)
    compute_and_insert(cache, keys, checkpoint=True)
    flush_all(cache)

    assert len(keys) == reused_length(opened(tmp_path), keys)


def test_every_flipped_bit_is_detected(written: Path, folder: Path) -> None:
    check_flips(300, written, folder)


@pytest.mark.slow
def test_every_flipped_bit_is_detected_many(written: Path, folder: Path) -> None:
    check_flips(10_000, written, folder)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100, 700, -1])
def test_a_truncated_file_is_invalid(folder: Path, length: int) -> None:
    reports = Reports()
    for file in files(folder):
        file.write_bytes(file.read_bytes()[:length])
    cache = opened(folder, reports)

    assert 0 == reused_length(cache, TEXT)
    compute_and_insert(cache, TEXT)
    assert len(TEXT) == reused_length(cache, TEXT)
    check_references(cache)


def test_an_invalid_file_is_reported_and_deleted(folder: Path) -> None:
    reports = Reports()
    for file in files(folder):
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    cache = opened(folder, reports)
    reused_length(cache, TEXT)

    assert ["invalid" in report for report in reports] == [True]
    assert 0 < len(files(folder)) + 1 <= 4


def test_identities_do_not_share_files(folder: Path) -> None:
    here = files(folder)[0].parent
    other = opened(folder, identity="other")
    assert 0 == reused_length(other, TEXT)
    compute_and_insert(other, (1, 2, 3))
    other.flush_to_disk(10**6)
    (there,) = {file.parent for file in files(folder)} - {here}
    for file in files(here):
        shutil.copy(file, there)

    assert 0 == reused_length(opened(folder, identity="other"), TEXT)
    assert 1 == len(files(there))
    assert 30 == reused_length(opened(folder), TEXT[:30])


def test_files_of_other_identities_are_deleted_for_space(folder: Path) -> None:
    size = sum(file.stat().st_size for file in files(folder))
    oldest = files(folder)[0]
    os.utime(oldest, (0, 0))
    make(FULL, offload=OffloadConfig(folder=folder, disk_bytes=size, identity="other"))
    assert oldest.exists()
    make(FULL, offload=OffloadConfig(folder=folder, disk_bytes=size - 1, identity="other"))

    assert not oldest.exists()
    assert [] != files(folder)


def test_files_of_another_format_are_deleted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FORMAT", "cellar-offload-2")

    assert 0 == reused_length(opened(folder), TEXT)
    assert [] == files(folder)


def test_a_file_without_its_prefix_is_deleted(folder: Path) -> None:
    cache = opened(folder)
    first = next(file for file in files(folder) if DiskFolder(folder, "model").read(file.name) and starts_at_zero(file))
    first.unlink()
    reopened = opened(folder)

    assert 0 == reused_length(reopened, TEXT)
    assert [] == files(folder)
    assert 0 == reused_length(cache, TEXT)


@pytest.mark.parametrize("start", [-5, -1, 5, 6])
def test_a_file_without_tokens_is_deleted(start: int, tmp_path: Path) -> None:
    single = DiskFolder(tmp_path, "model")
    for begin in (start, 4):
        single.write(single.encode(FileHeader(b"", begin, np.arange(5), True), [{}]))

    assert [4] == [found.header.start for found in single.scan()]
    assert 1 == len(files(tmp_path))


def starts_at_zero(file: Path) -> bool:
    """Whether a file holds the start of its path."""
    return b'\\"start\\": 0,' in file.read_bytes()


def test_unknown_files_in_the_folder_are_left_alone(folder: Path, tmp_path: Path) -> None:
    """Links, folders, pipes and foreign files are neither followed nor deleted; stale temporary files are deleted."""
    here = files(folder)[0].parent
    secret = tmp_path / "secret"
    secret.write_text("mine")
    (here / ("0" * 64 + ".safetensors")).symlink_to(secret)
    (here / ("1" * 64 + ".safetensors")).mkdir()
    os.mkfifo(here / ("2" * 64 + ".safetensors"))
    (here / "notes.txt").write_text("keep me")
    new_entries, old = here / ".new_entries.1", here / ".old.1"
    new_entries.touch()
    old.touch()
    os.utime(old, (time.time() - 3600, time.time() - 3600))

    assert 30 == reused_length(opened(folder), TEXT[:30])
    assert "mine" == secret.read_text()
    assert (here / "notes.txt").exists()
    assert (True, False) == (new_entries.exists(), old.exists())


@pytest.mark.parametrize("years", [10, -10])
def test_a_clock_that_jumped_keeps_the_files_and_their_order(folder: Path, years: int) -> None:
    """Those used after the jump come last in the deletion for space; temporary files are stale all the same."""
    jumped = time.time() - years * 365 * 86400
    stale = files(folder)[0].parent / ".stale.1"
    stale.touch()
    for file in [*files(folder), stale]:
        os.utime(file, (jumped, jumped))
    assert 30 == reused_length(opened(folder), TEXT[:30])
    assert not stale.exists()
    newest, size = files(folder)[0], sum(file.stat().st_size for file in files(folder))
    os.utime(newest)
    make(FULL, offload=OffloadConfig(folder=folder, disk_bytes=size - 1, identity="other"))

    assert newest.exists()
    assert [] != files(folder)


def test_a_clock_that_jumped_does_not_stop_the_times_of_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskFolder(folder, "model")
    name = store.write(store.encode(FileHeader(b"", 0, np.arange(2), ends_edge=True), []))
    file = next(file for file in files(folder) if file.name == name)
    store.touch(name)
    os.utime(file, (0, 0))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    store.touch(name)

    assert 0 != file.stat().st_mtime


def test_files_are_private(folder: Path) -> None:
    here = files(folder)[0].parent
    assert 0o700 == stat.S_IMODE(here.parent.stat().st_mode)

    assert {0o600} == {stat.S_IMODE(file.stat().st_mode) for file in files(written_again(folder))}
    assert 0o700 == stat.S_IMODE(here.stat().st_mode)


def written_again(folder: Path) -> Path:
    """A second folder with files written just now."""
    beside = folder / "beside"
    cache = opened(beside)
    compute_and_insert(cache, TEXT)
    cache.flush_to_disk(10**6)
    return beside


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_failing_disk_is_reported_once_and_retried_later(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = Reports()
    cache = opened(tmp_path, reports)
    compute_and_insert(cache, TEXT)

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    start = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: start)
        patch.setattr(os, call, full)
        for _ in range(20):
            assert not cache.flush_to_disk(10**6)
        assert 1 == len(reports)
        assert [] == [file for file in tmp_path.rglob("*") if file.is_file()]
        # The first pause takes one second, the next two.
        for seconds, tried in ((1.5, 2), (3.0, 2), (4.0, 3)):
            patch.setattr(time, "monotonic", lambda at=start + seconds: at)
            assert not cache.flush_to_disk(10**6)
            assert tried == len(reports)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    flush_all(cache)

    assert len(TEXT) == reused_length(opened(tmp_path), TEXT)


def test_a_deleted_folder_is_created_again(folder: Path) -> None:
    cache = opened(folder)
    shutil.rmtree(folder)

    assert 0 == reused_length(cache, TEXT[:30])
    compute_and_insert(cache, TEXT[:30])
    flush_all(cache)
    assert 30 == reused_length(opened(folder), TEXT[:30])


def test_equal_content_has_one_name(tmp_path: Path) -> None:
    single = DiskFolder(tmp_path, "model")
    header = FileHeader(b"salt", 0, np.arange(5), True)
    names = {single.write(single.encode(header, [{"a": torch.arange(3)}, {}])) for _ in range(20)}

    assert 1 == len(names)
