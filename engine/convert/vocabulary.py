"""A tokenizer as GGUF metadata: byte-level BPE (model "gpt2") and SentencePiece's BPE with byte fallback ("llama")."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from gguf import TokenType
from tokenizers import Regex, pre_tokenizers

from engine.gguf.architectures.settings import Inexpressible, Value
from engine.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_PREFIX = "tokenizer.ggml"
_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "unknown": "unk_token_id", "padding": "pad_token_id"}
# SentencePiece's letter for a space.
_SPACE = "\u2581"
# Text that different pre-tokenizers split differently.
_CHECK_TEXT = (
    "I'll I'LL we've 1 12 123 1234567 3.14,15 é9 ÀÉ aB ABc  a   b\n\nc\r\n d\t!!!\n ?!/ x_y $+<=>^~|`"
    " \u0928\u092e\u0938\u094d"
    " \u4f60\u597d\uff0c\u4e16\u754c \u304b\u306a\ud55c\uad6d\u0e44\u0e17\u0e22 \n  "
)
_byte = re.compile(r"<0x[0-9A-F]{2}>")


def tokenizer_metadata(tokenizer: Any, config: Any, pre_tokenizer: str | None = None) -> dict[str, Value]:
    """The metadata of a tokenizer for the first `vocab_size` tokens. Raises Inexpressible.

    pre_tokenizer  its name in GGUF; None: the one with the same effect
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise Inexpressible(f"the tokenizer {type(tokenizer).__name__} has no tokenizer.json")
    content = json.loads(backend.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        raise Inexpressible(f"tokenizers of type {model['type']} are not written; byte-level and SentencePiece BPE are")
    tokens, types = _tokens(backend, content, config.vocab_size)
    values: dict[str, Value] = {"tokens": tokens, "token_type": types}
    if model.get("byte_fallback"):
        values |= {"model": "llama", "pre": "default", "scores": _scores(tokens, model)}
        values["add_space_prefix"] = _adds_space(content)
    elif "ByteLevel" in json.dumps([content["pre_tokenizer"], content["decoder"]]):
        values |= {
            "model": "gpt2",
            "pre": pre_tokenizer or _pre_tokenizer(backend, model),
            "merges": _merges(tokens, model),
        }
    else:
        raise Inexpressible("its BPE tokenizer has neither bytes as letters nor byte fallback")
    values |= _special_tokens(tokenizer, config)
    return {f"{_PREFIX}.{key}": value for key, value in values.items()} | dict(_templates(tokenizer))


def _tokens(backend: Any, content: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """The texts and types of all tokens; numbers without a token are unused."""
    tokens, types = [f"[PAD{number}]" for number in range(size)], [int(TokenType.UNUSED)] * size
    unknown = content["model"].get("unk_token")
    for token, number in backend.get_vocab(with_added_tokens=False).items():
        if number < size:
            tokens[number] = token
            types[number] = int(TokenType.BYTE if _byte.fullmatch(token) else TokenType.NORMAL)
            if token == unknown:
                types[number] = int(TokenType.UNKNOWN)
    for added in content["added_tokens"]:
        number, special = added["id"], added["special"]
        if number < size and types[number] != TokenType.UNKNOWN:
            tokens[number] = added["content"] if special else added["content"].replace(_SPACE, " ")
            types[number] = int(TokenType.CONTROL if special else TokenType.USER_DEFINED)
    return tokens, types


def _pairs(model: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The merges in order; older files write a pair as one text."""
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


def _merges(tokens: list[str], model: dict[str, Any]) -> list[str]:
    merges = [f"{left} {right}" for left, right in _pairs(model)]
    known = set(tokens)
    # The list must not be empty: a merge without a result is never applied.
    return merges or [next(f"{token} {token}" for token in tokens if token * 2 not in known)]


def _scores(tokens: list[str], model: dict[str, Any]) -> list[float]:
    """Minus the rank of the first merge that makes a token. Raises Inexpressible if ranks are not by token."""
    ranks: dict[str, int] = {}
    last = ""
    for left, right in _pairs(model):
        made = left + right
        if made != last and made in ranks:
            raise Inexpressible(f"its merges are not in the order of SentencePiece: {made!r} has two ranks")
        ranks.setdefault(made, len(ranks))
        last = made
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def _adds_space(content: dict[str, Any]) -> bool:
    """Whether a space is put in front of a text: by the normalizer, or by a pre-tokenizer "Metaspace"."""
    text = json.dumps([content["normalizer"], content["pre_tokenizer"]])
    return '"Prepend"' in text or '"prepend_scheme": "first"' in text or '"prepend_scheme": "always"' in text


def _pre_tokenizer(backend: Any, model: dict[str, Any]) -> str:
    """The name of a pre-tokenizer that splits the check text like this one. Raises Inexpressible."""
    splits = _words(backend.pre_tokenizer)
    for name, known in PRE_TOKENIZERS.items():
        same_merges = known.ignore_merges == bool(model.get("ignore_merges"))
        if known.byte_level and same_merges and splits == _words(_build(known)):
            return name
    raise Inexpressible("no pre-tokenizer of GGUF splits text in its way; --pre-tokenizer names one that is close")


def _words(pre_tokenizer: Any) -> list[str]:
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(_CHECK_TEXT)]


def _build(known: PreTokenizer) -> Any:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in known.patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _special_tokens(tokenizer: Any, config: Any) -> dict[str, Value]:
    """Special tokens, whether they are added to a text, and a second token that ends an answer."""
    numbers = {name: getattr(tokenizer, attribute, None) for name, attribute in _SPECIAL.items()}
    special: dict[str, Value] = {
        f"{name}_token_id": number
        for name, number in numbers.items()
        if number is not None and 0 <= number < config.vocab_size
    }
    encoded = tokenizer.backend_tokenizer.encode("a").ids
    special["add_bos_token"] = bool(encoded) and encoded[0] == numbers["bos"]
    special["add_eos_token"] = bool(encoded) and encoded[-1] == numbers["eos"]
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = [end for end in ends if end is not None and 0 <= end < config.vocab_size]
    if ends:
        special.setdefault("eos_token_id", ends[0])
        others = [end for end in ends if end != special["eos_token_id"]]
        if others:
            special["eot_token_id"] = others[0]
    return special


def _templates(tokenizer: Any) -> Iterator[tuple[str, Value]]:
    """The chat templates: the default one, and others by name."""
    template = tokenizer.chat_template
    named = template if isinstance(template, dict) else {"default": template} if template else {}
    others = [name for name in named if name != "default"]
    if others:
        yield "tokenizer.chat_templates", others
    for name, text in named.items():
        yield "tokenizer.chat_template" if name == "default" else f"tokenizer.chat_template.{name}", text
