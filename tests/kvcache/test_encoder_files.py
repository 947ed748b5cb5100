"""Files of encoder entries: found by the next process, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvcache.encoder_cache import EncoderEntry
from kvcache.encoder_files import ENCODER_CODEC, EncoderFiles
from kvcache.offload import OffloadConfig
from tests.kvcache.test_encoder_cache import entry


def files(folder: Path, *, identity: str = "model", disk_bytes: int = 2**20) -> EncoderFiles[EncoderEntry]:
    """The files of one process."""
    config = OffloadConfig(folder=folder, disk_bytes=disk_bytes, identity=identity)
    return EncoderFiles(config, torch.device("cpu"), ENCODER_CODEC)


def written(folder: Path, *names: str) -> list[Path]:
    """Files of some entries, written in order."""
    first = files(folder)
    for name in names:
        first.enqueue(entry(name, 3))
    while first.flush_one():
        pass
    return sorted(folder.glob("*/*.safetensors"))


def test_entries_survive_the_process(tmp_path: Path) -> None:
    written(tmp_path, "a", "b")
    found, right = files(tmp_path).read(b"b"), entry("b", 3)

    assert found is not None
    assert found.digest == b"b"
    assert list(right.layers) == list(found.layers)
    for layer, (keys, values) in right.layers.items():
        assert torch.equal(keys, found.layers[layer][0])
        assert torch.equal(values, found.layers[layer][1])


def test_identities_do_not_share_entries(tmp_path: Path) -> None:
    written(tmp_path, "a")

    assert files(tmp_path, identity="other").read(b"a") is None


@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_a_changed_file_is_invalid_and_deleted(tmp_path: Path, share: float) -> None:
    (file,) = written(tmp_path, "a")
    data = bytearray(file.read_bytes())
    data[int(share * len(data))] ^= 1
    file.write_bytes(bytes(data))

    assert files(tmp_path).read(b"a") is None
    assert not file.exists()


def test_a_missing_file_is_no_error(tmp_path: Path) -> None:
    (file,) = written(tmp_path, "a")
    later = files(tmp_path)
    file.unlink()

    assert later.read(b"a") is None
    assert later.read(b"a") is None


def test_files_keep_to_their_budget(tmp_path: Path) -> None:
    sizes = [file.stat().st_size for file in written(tmp_path, "a", "b", "c")]
    left = files(tmp_path, disk_bytes=8 * 2 * max(sizes))

    assert 2 == sum(left.read(name) is not None for name in (b"a", b"b", b"c"))


def test_without_a_folder_nothing_is_written() -> None:
    none = EncoderFiles(OffloadConfig(), torch.device("cpu"), ENCODER_CODEC)
    none.enqueue(entry("a", 1))

    assert not none.flush_one()
    assert none.read(b"a") is None
