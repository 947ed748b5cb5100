"""Damaged or hostile metadata of tokenizers gets an error that names the key."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from engine.gguf.charsmap import checked_charsmap
from engine.gguf.chat_template import read_chat_template
from engine.gguf.container import GgufError
from engine.gguf.merges import derive_merges
from engine.gguf.tokenizer import read_tokenizer
from engine.gguf.vocabulary import read_vocabulary
from tests.engine.gguf.vocabularies import KINDS, exported, texts

Change = Callable[[list[Any]], Any]


def changed(kind: str, name: str, change: Change | Any) -> dict[str, Any]:
    """The metadata of a tokenizer with another value, or the result of a function of the value."""
    values = exported(kind)
    key = f"tokenizer.ggml.{name}"
    return values | {key: change(list(values[key])) if callable(change) else change}


@pytest.mark.parametrize(
    ("kind", "name", "change", "reason"),
    [
        ("llama", "scores", lambda scores: scores[:-1], "scores has .* items for .* tokens"),
        ("llama", "scores", lambda scores: [*scores, 0.0], "scores has .* items for .* tokens"),
        ("llama", "scores", [], "lacks tokenizer.ggml.scores"),
        ("llama", "scores", lambda scores: [float("nan"), *scores[1:]], "scores has a score that is not finite"),
        ("llama", "scores", lambda scores: [-float("inf"), *scores[1:]], "scores has a score that is not finite"),
        ("llama", "scores", lambda scores: ["x", *scores[1:]], "scores is no list of numbers"),
        ("llama", "scores", 1.0, "scores is no list of numbers"),
        ("llama", "token_type", lambda types: types[1:], "token_type has .* items for .* tokens"),
        ("llama", "token_type", lambda types: [9, *types[1:]], "token_type has the unknown type 9"),
        ("llama", "token_type", lambda types: [None, *types[1:]], "token_type is no list of numbers"),
        ("llama", "tokens", lambda tokens: [7, *tokens[1:]], "tokens is no list of strings"),
        ("llama", "tokens", lambda tokens: [tokens[5], *tokens[1:]], "tokens has the token '<0x01>' twice"),
        ("llama", "tokens", lambda tokens: ["a"] * len(tokens), "tokens has the token 'a' twice"),
        ("llama", "tokens", [], "tokens is empty"),
        ("llama", "tokens", None, "lacks tokenizer.ggml.tokens"),
        ("llama", "eos_token_id", "2", "eos_token_id is no integer"),
        ("llama", "eos_token_id", True, "eos_token_id is no integer"),
        ("llama", "add_bos_token", 1, "add_bos_token is no boolean"),
        ("llama", "add_space_prefix", "yes", "add_space_prefix is no boolean"),
        ("llama", "model", 3, "model is no string"),
        ("llama", "model", None, "lacks tokenizer.ggml.model"),
        ("gpt2", "merges", None, "lacks tokenizer.ggml.merges"),
        ("gpt2", "merges", "a b", "merges is no list of strings"),
        ("gpt2", "merges", lambda merges: [*merges, 5], "merges is no list of strings"),
        ("gpt2", "merges", lambda merges: ["ab", *merges], "merges has at 0 no pair of tokens: 'ab'"),
        ("gpt2", "merges", lambda merges: ["a ", *merges], "merges has at 0 no pair of tokens: 'a '"),
        ("gpt2", "merges", lambda merges: [" a", *merges], "merges has at 0 no pair of tokens: ' a'"),
        ("gpt2", "merges", lambda merges: ["", *merges], "merges has at 0 no pair of tokens: ''"),
        ("gpt2", "merges", lambda merges: ["a b c", *merges], "merges has at 0 a pair that makes no token"),
        ("gpt2", "merges", lambda merges: ["q q", *merges], "merges has at 0 a pair that makes no token: 'q q'"),
        ("gpt2", "merges", lambda merges: ["qqq x", *merges], "merges has at 0 a pair that makes no token"),
        ("gpt2", "pre", 4, "pre is no string"),
        ("gpt2", "pre", "rot13", "pre is 'rot13', which is not supported"),
        ("gpt2", "add_eos_token", None, "add_eos_token is no boolean"),
        ("gpt2", "bos_token_id", 2**32 - 1, "needs the BOS token"),
        ("t5", "precompiled_charsmap", "abc", "precompiled_charsmap is no list of bytes"),
        ("t5", "precompiled_charsmap", 2**40, "precompiled_charsmap is no list of bytes"),
        ("t5", "precompiled_charsmap", [1, 2], "precompiled_charsmap is truncated"),
        ("t5", "precompiled_charsmap", [255] * 4 + [0] * 40, "precompiled_charsmap is truncated"),
        ("t5", "precompiled_charsmap", [4, 0, 0, 0, 97, 98, 99, 100], "precompiled_charsmap leads beyond its end"),
        ("t5", "remove_extra_whitespaces", 0, "remove_extra_whitespaces is no boolean"),
    ],
)
def test_faults_are_named(kind: str, name: str, change: Change | Any, reason: str) -> None:
    """By their key, and the item where one is wrong."""
    values = changed(kind, name, change)
    if name == "bos_token_id":
        values["tokenizer.ggml.add_bos_token"] = True
    with pytest.raises(GgufError, match=reason):
        read_tokenizer(values)


def test_tokens_that_are_too_long_to_be_split_are_refused() -> None:
    """The time of all splits is proportional to the square of the length."""
    values = exported("llama")
    values["tokenizer.ggml.tokens"][-1] = "ab" * 2**15

    with pytest.raises(GgufError, match="a token of 65536 characters"):
        read_tokenizer(values)


def test_tokens_that_are_parts_of_each_other_take_bounded_memory() -> None:
    """Their merges have the cube of their number in characters: 1.2 GB of a vocabulary of 1.1 MB."""
    tokens = ["a" * length for length in range(1, 1400)]
    tracemalloc.start()
    try:
        with pytest.raises(GgufError, match="parts of each other"):
            derive_merges(tokens, [0.0] * len(tokens), range(len(tokens)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 64 * sum(map(len, tokens))
    assert 100 * 99 // 2 == len(derive_merges(tokens[:100], [0.0] * 100, range(100)))


def test_merges_that_repeat_each_other_end() -> None:
    """A pair of a token and itself, and pairs that overlap: each merge shortens the text."""
    values = exported("gpt2")
    values["tokenizer.ggml.tokens"] += ["qq", "qqq", "qqqq"]
    values["tokenizer.ggml.token_type"] += [1, 1, 1]
    values["tokenizer.ggml.merges"] = ["q q", "qq q", "q qq", "qq qq", "qqq q", "q qqq"] * 3
    tokenizer = read_tokenizer(values)
    size = len(values["tokenizer.ggml.tokens"])

    assert [[size - 1] * 250] == [tokenizer("q" * 1000, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_any_type_get_an_error(kind: str) -> None:
    """Every key with a value of every type, and lists with an item of every type."""
    reasons = list[str]()
    wrong: list[Any] = [None, True, -1, 2**64, 0.5, float("nan"), "", "x", [], [None], [[]], [0], [""], {}]
    for key, value in exported(kind).items():
        lists = [[each, *value[1:]] for each in wrong] if isinstance(value, list) else []
        for other in [*wrong, *lists]:
            try:
                read_tokenizer(exported(kind) | {key: other})("the world")
            except GgufError as error:
                reasons.append(str(error))
    assert reasons
    assert [] == [reason for reason in reasons if not reason.startswith("its ")]


@pytest.mark.parametrize("kind", KINDS)
def test_shuffled_vocabularies_are_refused_or_work(kind: str) -> None:
    """Ids, types and scores that do not fit the tokens."""
    for seed in range(20):
        shuffle, values = random.Random(seed), exported(kind)
        for name in ("tokens", "token_type", "scores", "merges"):
            items = values.get(f"tokenizer.ggml.{name}")
            if items and shuffle.random() < 0.5:
                shuffle.shuffle(items)
        try:
            tokenizer = read_tokenizer(values)
        except GgufError:
            continue
        for text in texts(seed, 5):
            tokenizer.decode(tokenizer(text)["input_ids"])


def test_damaged_character_maps_are_refused_or_work() -> None:
    """The tokenizers library would panic with one that leads beyond its end."""
    refused = 0
    for seed in range(300):
        damaged = random.Random(seed)
        items = _identity_map()
        items[damaged.randrange(len(items))] = damaged.randrange(256)
        try:
            checked_charsmap(items, "key")
        except GgufError:
            refused += 1
            continue
        values = exported("t5") | {"tokenizer.ggml.precompiled_charsmap": items}
        read_tokenizer(values)("abc the world \u00a0\n")

    assert 0 < refused < 300


def test_a_character_map_replaces_text() -> None:
    """`a` by `the`."""
    values = exported("t5") | {"tokenizer.ggml.precompiled_charsmap": _identity_map()}
    plain = read_tokenizer(exported("t5"))

    assert plain("the")["input_ids"] == read_tokenizer(values)("a")["input_ids"]


def _identity_map() -> list[int]:
    """A character map with one replacement: `a` by `the`.

    The root's children begin at unit 256; the leaf of `a` has its value at 512.
    """
    units = [0] * 768
    units[0] = 256 << 10
    child = 256 ^ ord("a")
    units[child] = ord("a") | 1 << 8 | (child ^ 512) << 10
    units[512] = 2**31
    return [*(4 * len(units)).to_bytes(4, "little"), *b"".join(unit.to_bytes(4, "little") for unit in units), *b"the\0"]


@pytest.mark.parametrize("value", [10**6, -1, -7, 2**32 - 1])
def test_ids_outside_the_vocabulary_are_ignored(value: int) -> None:
    """The default of the kind holds, as in llama.cpp."""
    found = read_vocabulary(changed("llama", "eos_token_id", value) | {"tokenizer.ggml.padding_token_id": value})

    assert found.special["eos"] == 2
    assert "pad" not in found.special
    assert 2 in found.end_tokens


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"tokenizer.chat_template": 5}, "tokenizer.chat_template is no string"),
        ({"tokenizer.chat_template": ["{{ x }}"]}, "tokenizer.chat_template is no string"),
        ({"tokenizer.chat_templates": "rag"}, "tokenizer.chat_templates is no list of strings"),
        ({"tokenizer.chat_templates": ["rag"]}, "lacks tokenizer.chat_template.rag"),
        (
            {"tokenizer.chat_templates": ["rag"], "tokenizer.chat_template.rag": 1},
            "tokenizer.chat_template.rag is no string",
        ),
        ({"tokenizer.chat_template.rag": 1}, "tokenizer.chat_template.rag is no string"),
    ],
)
def test_chat_templates_of_a_wrong_type_are_named(values: dict[str, Any], reason: str) -> None:
    """Default ones and others."""
    with pytest.raises(GgufError, match=reason):
        read_chat_template(values)
