"""Small vocabularies of every kind as GGUF metadata, with the tokenizers that they were exported from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "[CLS]", "[SEP]"]
# The first words of texts, and letters outside of the vocabularies.
WORDS = [
    *("the", "theatre", "there", "their", "Hello", "hello", "world", "don't", "we'll", "1234567", "3.14", "x+y=z"),
    *("naïve", "Straße", "Привет", "мир", "世界", "你好", "हिन्दी", "camelCase", "ABCdef", "=====", "...", "\U0001f999"),
]
GAPS = [" ", " ", " ", "  ", "    ", "\n", "\n\n", "\t", " \n ", "", "\u00a0"]
RARE = ["\u0e01", "\U0001f600", "\u2603", "<unk>", "</s>", "<0x41>", "Ω"]
KINDS = ["llama", "gpt2", "gemma4", "bert", "t5"]

CORPUS = [" ".join(WORDS), *(f"{first} {second}" for first in WORDS for second in WORDS)]


def texts(seed: int, count: int, *, rare: bool = True) -> list[str]:
    """Random texts of words and spaces; `rare`: also of characters and spellings outside of the vocabularies."""
    random = Random(seed)
    words = WORDS + (RARE if rare else [])
    return [
        "".join(part for _ in range(random.randint(1, 12)) for part in (random.choice(words), random.choice(GAPS)))
        for _ in range(count)
    ]


def metadata(kind: str, tokens: Sequence[str], types: Sequence[int], **values: Any) -> dict[str, Any]:
    """The metadata of a tokenizer; further values by the end of their key."""
    return {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": list(types),
        **{f"tokenizer.ggml.{name}": value for name, value in values.items()},
    }


@cache
def _sentencepiece() -> tuple[list[str], list[float]]:
    """Tokens and scores: parts have higher scores than their wholes, as in trained vocabularies."""
    random = Random(0)
    letters = sorted(set("".join(WORDS) + SPACE + "\n"))
    longer = {
        word[start:stop]
        for word in [SPACE + word for word in WORDS] + [SPACE * 4, "\n\n"]
        for start in range(len(word))
        for stop in range(start + 2, len(word) + 1)
    }
    pieces = sorted(sorted(longer), key=lambda piece: (len(piece), random.random()))[:400]
    tokens = ["<unk>", "<s>", "</s>", "<|user|>", *BYTES, *pieces, *letters]
    ranks = {piece: -float(rank) for rank, piece in enumerate(pieces)}
    return tokens, [ranks.get(token, 0.0 if token.startswith("<") else -1000.0) for token in tokens]


def _byte_pairs(pattern: str | None) -> Backend:
    """A trained byte-level tokenizer."""
    backend = Backend(models.BPE())
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL[:4], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _gemma4() -> Backend:
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[*SPECIAL[:4], *BYTES], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _word_pieces() -> Backend:
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    )
    return backend


def _unigram() -> Backend:
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE)
    backend.decoder = decoders.Metaspace(SPACE)
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL[:4], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def trained(kind: str, pattern: str | None = None) -> Backend:
    """The tokenizer that `exported` writes; all kinds but llama."""
    return _trained(kind, pattern)


@cache
def _trained(kind: str, pattern: str | None) -> Backend:
    # Training depends on the order of a hash table: the same words give other tokens.
    if kind == "gpt2":
        return _byte_pairs(pattern)
    return {"gemma4": _gemma4, "bert": _word_pieces, "t5": _unigram}[kind]()


def exported(kind: str, *, pre: str = "gpt-2", pattern: str | None = None) -> dict[str, Any]:
    """The metadata that a converter writes for a tokenizer. The pattern is that of the pre-tokenizer `pre`."""
    if kind == "llama":
        tokens, scores = _sentencepiece()
        return metadata(kind, tokens, list(map(_type, tokens)), scores=list(scores), add_bos_token=False)
    backend = trained(kind, pattern)
    content = json.loads(backend.to_str())["model"]
    tokens = [str(backend.id_to_token(token)) for token in range(backend.get_vocab_size())]
    types = list(map(_type, tokens))
    if kind == "bert":
        ids = {"unknown_token_id": 0, "bos_token_id": 4, "seperator_token_id": 5, "padding_token_id": 0}
        spelled = [token if token in SPECIAL else _phantom(token) for token in tokens]
        return metadata(kind, spelled, types, mask_token_id=0, **ids)
    if kind == "t5":
        scores = [score for _, score in content["vocab"]]
        ids = {"unknown_token_id": 0, "eos_token_id": 2, "padding_token_id": 0}
        flags = {"add_eos_token": False, "remove_extra_whitespaces": True}
        return metadata(kind, tokens, types, scores=scores, **ids, **flags)
    merges = [" ".join(pair) for pair in content["merges"]]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return metadata(kind, tokens, types, merges=merges, pre=pre, add_bos_token=False, **ids)


def _type(token: str) -> int:
    if token in BYTES:
        return BYTE
    return UNKNOWN if token == "<unk>" else CONTROL if token in SPECIAL else NORMAL


def _phantom(token: str) -> str:
    """A piece of BERT as files spell it: marked at the start of a word, instead of inside of one."""
    return token[2:] if token.startswith("##") else SPACE + token
