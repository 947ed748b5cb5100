"""Tokenizers as GGUF metadata: the tokens of a text are the same after reading them back."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

from engine.convert.vocabulary import tokenizer_metadata
from engine.gguf.architectures.settings import Inexpressible
from engine.gguf.pre_tokenizers import PRE_TOKENIZERS
from engine.gguf.tokenizer import read_tokenizer
from tests.engine.convert.checkpoints import SIZE, byte_fallback, byte_level

TEXTS = (
    "The quick brown fox",
    "  two  spaces and a\ttab\n\nlines ",
    "12345 dogs' <tool> cellar<|end|> ü世界🦙",
    "<s>the dark</s> dogs",
    "",
)


def metadata(tokenizer: Any) -> dict[str, Any]:
    """The metadata, for a model with some more embeddings than tokens."""
    return dict(tokenizer_metadata(tokenizer, LlamaConfig(vocab_size=SIZE, eos_token_id=None)))


@pytest.mark.parametrize(
    "tokenizer",
    [byte_level(), byte_level(r"\p{N}"), byte_fallback(prefix=True), byte_fallback(prefix=False)],
    ids=["gpt-2", "smollm", "prefix", "no prefix"],
)
def test_tokens_of_a_text_are_unchanged(tokenizer: Any) -> None:
    again = read_tokenizer(metadata(tokenizer))

    for text in TEXTS:
        assert tokenizer.encode(text) == again.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == again.decode(again.encode(text))


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "qwen2", "llama-bpe", "gpt-4o", "tekken", "deepseek-v3", "glm4"])
def test_pre_tokenizer_is_found_by_its_effect(name: str) -> None:
    values = metadata(byte_level()) | {"tokenizer.ggml.pre": name}

    found = metadata(read_tokenizer(values))["tokenizer.ggml.pre"]

    assert PRE_TOKENIZERS[name].patterns == PRE_TOKENIZERS[found].patterns
    assert PRE_TOKENIZERS[name].ignore_merges == PRE_TOKENIZERS[found].ignore_merges


def test_special_tokens_are_named() -> None:
    values = metadata(byte_level())

    assert (0, 1) == (values["tokenizer.ggml.bos_token_id"], values["tokenizer.ggml.eos_token_id"])
    assert values["tokenizer.ggml.add_bos_token"]
    assert not values["tokenizer.ggml.add_eos_token"]
    assert "tokenizer.ggml.unknown_token_id" not in values


def test_second_end_token_ends_a_turn() -> None:
    config = LlamaConfig(vocab_size=SIZE, eos_token_id=[1, 2, SIZE])

    assert 2 == tokenizer_metadata(byte_level(), config)["tokenizer.ggml.eot_token_id"]


def test_named_templates_are_kept() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = {"default": "one", "tool_use": "two"}
    values = metadata(tokenizer)

    assert ("one", "two") == (values["tokenizer.chat_template"], values["tokenizer.chat_template.tool_use"])
    assert {"default": "one", "tool_use": "two"} == read_tokenizer(values).chat_template


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (models.WordLevel({"a": 0}, unk_token="a"), "tokenizers of type WordLevel"),
        (models.Unigram([("a", 0.0)], unk_id=0), "tokenizers of type Unigram"),
        (models.BPE({"a": 0}, []), "neither bytes as letters nor byte fallback"),
        (
            models.BPE(
                {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5},
                [("a", "b"), ("ab", "c"), ("b", "c"), ("a", "bc")],
                byte_fallback=True,
            ),
            "'abc' has two ranks",
        ),
    ],
)
def test_tokenizer_without_a_form_in_gguf_is_refused(model: Any, reason: str) -> None:
    with pytest.raises(Inexpressible, match=reason):
        metadata(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model)))


def test_unknown_pre_tokenizer_is_refused() -> None:
    with pytest.raises(Inexpressible, match="--pre-tokenizer"):
        metadata(byte_level("[aeiou]"))
    config = LlamaConfig(vocab_size=SIZE, eos_token_id=None)
    assert "gpt-2" == tokenizer_metadata(byte_level("[aeiou]"), config, "gpt-2")["tokenizer.ggml.pre"]
