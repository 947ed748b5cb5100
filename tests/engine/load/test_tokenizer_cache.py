"""A tokenizer from its cache entry equals the one from its own files."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    GemmaTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from engine.load import tokenizer_cache
from engine.load.tokenizer_cache import read_tokenizer
from engine.text import tokenizer as served
from engine.text.vocabulary import summarize
from tests.engine.tokenizers import FAST, tokenizer_of

BUNDLED = Path(__file__).parents[3] / "models" / "target"
TEMPLATE = "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}<end>{% endfor %}"
MESSAGES = [{"role": "user", "content": "How are <end> you?"}]
CORPUS = ["the cat and the dog äöü 世界 🦙", "a thing <end> is what it is", "don't say  that\n\nagain"] * 20
LETTERS = ["the", " cat", "世", "🦙", "ä", " ", "\n", "<end>", "<tool>", "<s>", "'s", "\x02", "zq", "<0x41>"]


def trained(model: Any, trainer: Any, *, byte_level: bool = False) -> Tokenizer:
    """A backend trained on the corpus, with added tokens of three kinds."""
    backend = Tokenizer(model)
    if byte_level:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    else:
        backend.normalizer = normalizers.Replace(" ", "\u2581")
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<start>", "<end>"])
    backend.add_tokens([AddedToken("<tool>", lstrip=True), AddedToken("zq", single_word=True, normalized=True)])
    backend.add_special_tokens([AddedToken("<last>", rstrip=True)])
    return backend


def bpe_trainer(**options: Any) -> Any:
    """A trainer for 400 tokens."""
    return trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False, **options)


def byte_level() -> Any:
    """The kind of GPT-2 and Llama 3."""
    model = models.BPE(ignore_merges=True)
    backend = trained(model, bpe_trainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()), byte_level=True)
    backend.enable_truncation(64)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", split_special_tokens=True)


def byte_fallback() -> Any:
    """The kind of Llama 2."""
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True, dropout=0.0)
    trainer = bpe_trainer(initial_alphabet=[f"<0x{byte:02X}>" for byte in range(256)])
    return PreTrainedTokenizerFast(tokenizer_object=trained(model, trainer), bos_token="<s>", eos_token="</s>")


def suffixed() -> Any:
    """The kind of CLIP and the first GPT."""
    model = models.BPE(unk_token="<unk>", end_of_word_suffix="</w>", continuing_subword_prefix="##")
    trainer = bpe_trainer(end_of_word_suffix="</w>", continuing_subword_prefix="##")
    return PreTrainedTokenizerFast(tokenizer_object=trained(model, trainer), eos_token="</s>")


def unigram() -> Any:
    """The kind of T5."""
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    return PreTrainedTokenizerFast(tokenizer_object=trained(models.Unigram(), trainer), eos_token="</s>")


def word_piece() -> Any:
    """The kind of BERT, a class that builds its own backend."""
    return BertTokenizer(vocab={piece: at for at, piece in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"catdog"])})


def of_class(kind: Any) -> Callable[[], Any]:
    """A class of transformers that reads the vocabulary and the merges of tokenizer.json."""

    def make() -> Any:
        model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
        content = json.loads(trained(model, bpe_trainer()).to_str())["model"]
        tokenizer = kind(vocab=content["vocab"], merges=[tuple(pair) for pair in content["merges"]])
        tokenizer.add_tokens(["<tool>"])
        tokenizer.add_special_tokens({"extra_special_tokens": ["<start>", "<end>"]})
        return tokenizer

    return make


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "byte-level BPE, trained": byte_level,
    "byte fallback, trained": byte_fallback,
    "BPE with a suffix": suffixed,
    "Unigram, trained": unigram,
    "WordPiece, BERT": word_piece,
    "Gemma": of_class(GemmaTokenizer),
    "Llama": of_class(LlamaTokenizer),
    "Qwen 2": of_class(Qwen2Tokenizer),
    **{kind: lambda kind=kind: tokenizer_of(kind) for kind in FAST},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a byte-level tokenizer."""
    return saved(byte_level(), tmp_path / "model")


def saved(tokenizer: Any, folder: Path) -> Path:
    """The folder with the tokenizer's files and a template."""
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def read(folder: Path, cache: Path) -> Any:
    """The tokenizer, with an entry for any size."""
    return read_tokenizer(folder, cache, large_bytes=0)[0]


def read_entry(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tokenizer from its entry."""
    with monkeypatch.context() as patched:
        patched.setattr(tokenizer_cache, "AutoTokenizer", None)
        return read(folder, cache)


def state(tokenizer: Any) -> dict[str, str]:
    """The attributes of a tokenizer without its backend."""
    return {name: repr(value) for name, value in vars(tokenizer).items() if name != "_tokenizer"}


def texts() -> list[str]:
    """Random texts of pieces."""
    random = Random(7)
    return ["", *CORPUS[:3], *("".join(random.choices(LETTERS, k=12)) for _ in range(100))]


@pytest.mark.parametrize("kind", [*TOKENIZERS, "bundled"])
def test_cached_tokenizer_equals_the_one_of_its_files(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State, backend, tokens, texts, templates and token bytes are equal to AutoTokenizer's."""
    folder = BUNDLED if kind == "bundled" else saved(TOKENIZERS[kind](), tmp_path / "model")
    first, own = read(folder, tmp_path / "cache"), AutoTokenizer.from_pretrained(folder)
    again = read_entry(folder, tmp_path / "cache", monkeypatch)

    assert type(own) is type(first) is type(again)
    assert state(own) == state(again)
    assert own.backend_tokenizer.to_str() == again.backend_tokenizer.to_str()
    assert own.backend_tokenizer.encode_special_tokens == again.backend_tokenizer.encode_special_tokens
    for text in texts():
        for special in (True, False):
            tokens = own(text, add_special_tokens=special)["input_ids"]
            assert tokens == again(text, add_special_tokens=special)["input_ids"]
            assert own.decode(tokens, skip_special_tokens=special) == again.decode(tokens, skip_special_tokens=special)
    assert own.apply_chat_template(MESSAGES, tokenize=True) == again.apply_chat_template(MESSAGES, tokenize=True)
    assert own.get_added_vocab() == again.get_added_vocab()
    assert bytes_of(own) == bytes_of(again)


def test_entry_holds_the_summary_of_the_vocabulary(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary is not read from the backend again."""
    expected = summarize(AutoTokenizer.from_pretrained(folder).get_vocab())

    assert expected == read_tokenizer(folder, tmp_path / "cache", large_bytes=0)[1]
    with monkeypatch.context() as patched:
        patched.setattr(tokenizer_cache, "AutoTokenizer", None)
        patched.setattr(tokenizer_cache, "summarize", None)
        assert expected == read_tokenizer(folder, tmp_path / "cache", large_bytes=0)[1]


def bytes_of(tokenizer: Any) -> tuple[list[bytes], list[int]]:
    """The bytes of all tokens, and the special tokens, by the engine."""
    size = len(tokenizer)
    own = served.Tokenizer(tokenizer, vocabulary_size=size, context=64)
    return own.token_bytes(0, size), own.markers()


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "harmful"])
def test_broken_entry_is_replaced(
    damage: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line is logged, and the next start reads a valid entry."""
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "cache"
    own = read(folder, cache)
    (entry,) = cache.iterdir()
    good = entry.read_bytes()
    harmful = pickle.dumps(Harmful())
    entry.write_bytes(
        {
            "cut": good[:-10],
            "changed": good[:5000] + bytes([good[5000] ^ 1]) + good[5001:],
            "empty": b"",
            "harmful": hashlib.sha256(harmful).digest() + harmful,
        }[damage]
    )

    assert state(own) == state(read(folder, cache))
    assert "is built from its own files" in caplog.text
    assert state(own) == state(read_entry(folder, cache, monkeypatch))
    assert not (tmp_path / "harm").exists()


class Harmful:
    """Creates a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.txt"])
def test_changed_file_has_another_entry(file: str, folder: Path, tmp_path: Path) -> None:
    """Every file of the tokenizer counts, by content."""
    cache = tmp_path / "cache"
    read(folder, cache)
    content = (folder / file).read_text(encoding="utf-8") if (folder / file).exists() else "more"
    (folder / file).write_text(content.replace("<end>", "<halt>") + " ", encoding="utf-8")

    again = read(folder, cache)

    assert 2 == len(list(cache.iterdir()))
    assert state(AutoTokenizer.from_pretrained(folder)) == state(again)


def test_small_tokenizer_has_no_entry(folder: Path, tmp_path: Path) -> None:
    """Reading its own files is as fast."""
    read_tokenizer(folder, tmp_path / "cache")

    assert not (tmp_path / "cache").exists()


def test_backend_that_cannot_be_rebuilt_has_no_entry(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    merges = tokenizer_cache._parts
    monkeypatch.setattr(tokenizer_cache, "_parts", lambda backend: (*merges(backend)[:2], [], False))

    read(folder, tmp_path / "cache")

    assert "cannot be rebuilt" in caplog.text
    assert not (tmp_path / "cache").exists()


def test_unwritable_cache_folder_is_logged(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The tokenizer is read from its own files."""
    caplog.set_level("INFO")
    (tmp_path / "cache").write_text("a file", encoding="utf-8")

    assert state(AutoTokenizer.from_pretrained(folder)) == state(read(folder, tmp_path / "cache"))
    assert "at the next start, too" in caplog.text
