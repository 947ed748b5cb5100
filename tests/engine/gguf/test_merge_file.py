"""Derived merges in the cache folder: read at a later start, derived again from a file that does not fit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.gguf import merge_file
from engine.gguf.merges import Merge, derive_merges
from engine.gguf.tokenizer import read_tokenizer
from engine.gguf.vocabulary import Vocabulary, read_vocabulary
from tests.engine.gguf.vocabularies import exported, texts


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder of the files, which small vocabularies have too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(merge_file, "MIN_TOKENS", 0)
    return tmp_path / "kvcellar" / "tokenizers"


@pytest.fixture
def derived(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of merges of each derivation."""
    counts = list[int]()

    def spy(tokens: Sequence[str], scores: Sequence[float], mergeable: Sequence[int]) -> list[Merge]:
        counts.append(len(merges := derive_merges(tokens, scores, mergeable)))
        return merges

    monkeypatch.setattr(merge_file, "derive_merges", spy)
    return counts


def vocabulary() -> Vocabulary:
    return read_vocabulary(exported("llama"))


def mergeable() -> range:
    return range(4, len(vocabulary().tokens))


def test_a_later_start_reads_the_merges(folder: Path, derived: list[int]) -> None:
    first = merge_file.cached_merges(vocabulary(), mergeable())
    assert [len(first)] == derived
    assert 1 == len(list(folder.iterdir()))

    assert first == merge_file.cached_merges(vocabulary(), mergeable())
    assert [len(first)] == derived


def test_a_tokenizer_of_stored_merges_splits_texts_as_before(derived: list[int]) -> None:
    first, second = read_tokenizer(exported("llama")), read_tokenizer(exported("llama"))

    assert 1 == len(derived)
    assert first(texts(0, 50))["input_ids"] == second(texts(0, 50))["input_ids"]


def test_vocabularies_with_other_merges_have_other_files(folder: Path, derived: list[int]) -> None:
    """Other scores, other mergeable tokens, and the same characters in other tokens."""
    plain, (first, second, *others) = vocabulary(), vocabulary().tokens
    moved = [first[:-1], first[-1] + second, *others]
    for variant, tokens in [
        (plain, mergeable()),
        (replace(plain, scores=plain.scores[::-1]), mergeable()),
        (plain, mergeable()[1:]),
        (replace(plain, tokens=moved, ids={token: number for number, token in enumerate(moved)}), mergeable()),
    ]:
        expected = derive_merges(variant.tokens, variant.scores, tokens)
        assert expected == merge_file.cached_merges(variant, tokens)

    assert (4, 4) == (len(derived), len(list(folder.iterdir())))


def test_small_vocabularies_are_not_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_file, "MIN_TOKENS", len(vocabulary().tokens) + 1)

    assert merge_file.cached_merges(vocabulary(), mergeable())
    assert not folder.exists()


@pytest.mark.parametrize(
    "fault", ["truncated", "empty", "dtype", "shape", "no items", "other name", "id too high", "id below 0", "swapped"]
)
def test_a_damaged_file_is_derived_again_and_replaced(
    fault: str, folder: Path, derived: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning; the next start reads the new file."""
    expected = merge_file.cached_merges(vocabulary(), mergeable())
    (file,) = folder.iterdir()
    content, pairs = file.read_bytes(), load_file(file)["merges"]
    arrays = {
        "dtype": pairs.astype(np.int64),
        "shape": pairs.T.copy(),
        "no items": pairs[:0],
        "id too high": np.where(pairs == pairs[0, 0], len(vocabulary().tokens), pairs).astype(np.int32),
        "id below 0": np.where(pairs == pairs[0, 0], -1, pairs).astype(np.int32),
        # Ids in range that make no token.
        "swapped": pairs[:, ::-1].copy(),
    }
    if fault in arrays:
        written = pairs if fault == "swapped" else arrays[fault]
        save_file({"merges": arrays[fault]}, file, metadata={"sha256": hashlib.sha256(written).hexdigest()})
    elif fault == "other name":
        save_file({"pairs": pairs}, file)
    else:
        file.write_bytes(content[:-4] if fault == "truncated" else b"")

    assert expected == merge_file.cached_merges(vocabulary(), mergeable())
    assert (2, 1) == (len(derived), len(caplog.records))
    assert "the merges of the tokenizer are derived" in caplog.text
    assert content == file.read_bytes()
    assert expected == merge_file.cached_merges(vocabulary(), mergeable())
    assert 2 == len(derived)


def test_a_folder_that_other_users_can_write_to_is_neither_read_nor_written(folder: Path, derived: list[int]) -> None:
    expected = merge_file.cached_merges(vocabulary(), mergeable())
    (file,) = folder.iterdir()
    file.unlink()
    folder.chmod(0o777)

    assert expected == merge_file.cached_merges(vocabulary(), mergeable())
    assert 2 == len(derived)
    assert not list(folder.iterdir())
    folder.chmod(0o700)
    assert expected == merge_file.cached_merges(vocabulary(), mergeable())
    folder.chmod(0o777)
    assert expected == merge_file.cached_merges(vocabulary(), mergeable())
    assert 4 == len(derived)
