"""The vocabulary of a GGUF file: its tokens with scores and types, the special tokens, and the end tokens.

Files of old converters lack the type or the key of many special tokens, so that some are found by their text, as
llama.cpp finds them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gguf import Keys, TokenType

from engine.gguf.container import GgufError, Metadata

log = logging.getLogger("cellar.engine")

_KEYS = Keys.Tokenizer
_ID_KEYS = {
    "bos": _KEYS.BOS_ID,
    "eos": _KEYS.EOS_ID,
    "eot": _KEYS.EOT_ID,
    "eom": _KEYS.EOM_ID,
    "unk": _KEYS.UNK_ID,
    "sep": _KEYS.SEP_ID,
    "pad": _KEYS.PAD_ID,
    "mask": _KEYS.MASK_ID,
    "fim_pre": _KEYS.FIM_PRE_ID,
    "fim_suf": _KEYS.FIM_SUF_ID,
    "fim_mid": _KEYS.FIM_MID_ID,
    "fim_pad": _KEYS.FIM_PAD_ID,
    "fim_rep": _KEYS.FIM_REP_ID,
    "fim_sep": _KEYS.FIM_SEP_ID,
}
# Ids of files without their keys, by the kind of the vocabulary.
_DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "bert": {"bos": 101, "unk": 100, "sep": 102, "pad": 0, "mask": 103},
    "t5": {"eos": 1, "unk": 2, "pad": 0},
}
# -1 in files of old converters: there is no such token.
_NO_IDS = (-1, 2**32 - 1)
_TYPES: dict[float, TokenType] = {kind.value: kind for kind in TokenType}

# Special tokens by their text, for files without their keys. The first one of the vocabulary is taken.
_NAMED = {
    "eot": (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>"),
        *("_<EOT>", "[EOT]", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>"),
    ),
    "eom": ("<|eom_id|>",),
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>", "\u2581<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Tokens that end a generation wherever a vocabulary has them, and the special tokens that do.
_END_NAMES = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
)
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Parts of the names of models with special tokens that absorb the spaces after them, and the ones that do not.
_STRIPPED_MODELS = ("phi-3", "phi3")
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
_MASK_MODELS, _MASK_PRE_TOKENIZERS = (
    ("nomic-bert-moe", "jina-bert-v3"),
    ("jina-v2-de", "jina-v2-es", "jina-v2-code"),
)


# Texts that are looked up in a vocabulary for its special tokens.
_SEARCHED = frozenset({*_END_NAMES, "<|tool_response>", *(text for texts in _NAMED.values() for text in texts)})


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens of a vocabulary.

    size        tokens of the vocabulary
    special     see Vocabulary
    end_tokens  tokens that end a generation
    controls    tokens that are found by their text: control tokens, whatever type the file has
    plain       tokens that are no control tokens, although their text is that of one
    """

    size: int
    special: Mapping[str, int]
    end_tokens: frozenset[int]
    controls: frozenset[int]
    plain: frozenset[int]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A checked vocabulary.

    kind        of the tokenizer: the value of tokenizer.ggml.model
    ids         the id of each token by its text
    scores      by id; empty if the file has none
    special     ids by short name: "bos", "eos", "eot", "eom", "unk", "sep", "pad", "mask", "fim_pre", ...
    end_tokens  tokens that end a generation
    lstrip      added tokens that absorb the spaces before them
    rstrip      added tokens that absorb the spaces after them
    """

    kind: str
    tokens: list[str]
    ids: dict[str, int]
    types: list[TokenType]
    scores: list[float]
    special: Mapping[str, int]
    end_tokens: frozenset[int]
    lstrip: frozenset[int]
    rstrip: frozenset[int]

    def text(self, name: str) -> str | None:
        """The text of a special token by its short name."""
        return None if (token := self.special.get(name)) is None else self.tokens[token]

    def with_types(self, *types: TokenType) -> list[int]:
        """The ids of all tokens with one of the types."""
        return [token for token, kind in enumerate(self.types) if kind in types]


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of a file. Raises GgufError."""
    kind = text_value(metadata, _KEYS.MODEL)
    tokens = _tokens(metadata)
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(token for number, token in enumerate(tokens) if ids[token] != number)
        raise GgufError(f"its vocabulary {_KEYS.LIST} has the token {twice!r} twice")
    types = _types(metadata, len(tokens))
    special_tokens = _special_tokens(metadata, ids, len(tokens))
    for token in special_tokens.controls:
        types[token] = TokenType.CONTROL
    for token in special_tokens.plain:
        types[token] = TokenType.NORMAL
    scores, (lstrip, rstrip) = _scores(metadata, len(tokens)), _stripping(metadata, ids, types)
    return Vocabulary(
        kind, tokens, ids, types, scores, special_tokens.special, special_tokens.end_tokens, lstrip, rstrip
    )


def read_special_tokens(metadata: Metadata) -> SpecialTokens:
    """The special tokens of a file; the texts of others are not decoded. Raises GgufError."""
    size, ids = metadata.find_strings(_KEYS.LIST, _SEARCHED)
    if not size:
        raise GgufError(f"its vocabulary {_KEYS.LIST} is empty")
    return _special_tokens(metadata, ids, size)


def text_value(metadata: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """A string. Raises GgufError for another type, or for no value without a default."""
    value = metadata.get(key, default)
    if not isinstance(value, str):
        raise GgufError(f"its metadata {'lacks ' + key if value is None else key + ' is no string'}")
    return value


def flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    """A boolean. Raises GgufError for another type."""
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise GgufError(f"its metadata {key} is no boolean")
    return value


def strings(metadata: Mapping[str, Any], key: str) -> Sequence[str]:
    """A list of strings. Raises GgufError."""
    values = metadata.get(key)
    if values is None:
        raise GgufError(f"its metadata lacks {key}")
    if not isinstance(values, list | tuple) or not set(map(type, values)) <= {str}:
        raise GgufError(f"its metadata {key} is no list of strings")
    return values


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = strings(metadata, _KEYS.LIST)
    if not tokens:
        raise GgufError(f"its vocabulary {_KEYS.LIST} is empty")
    return [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]


def _types(metadata: Mapping[str, Any], size: int) -> list[TokenType]:
    values = _numbers(metadata, _KEYS.TOKEN_TYPE, size)
    try:
        return [_TYPES[value] for value in values] or [TokenType.NORMAL] * size
    except KeyError as error:
        raise GgufError(f"its metadata {_KEYS.TOKEN_TYPE} has the unknown type {error}") from error


def _scores(metadata: Mapping[str, Any], size: int) -> list[float]:
    scores = [float(value) for value in _numbers(metadata, _KEYS.SCORES, size)]
    if not all(map(math.isfinite, scores)):
        raise GgufError(f"its metadata {_KEYS.SCORES} has a score that is not finite")
    return scores


def _numbers(metadata: Mapping[str, Any], key: str, size: int) -> Sequence[float]:
    """A number for each token, or none. Raises GgufError."""
    values = metadata.get(key, ())
    if not isinstance(values, list | tuple) or not set(map(type, values)) <= {int, float}:
        raise GgufError(f"its metadata {key} is no list of numbers")
    if values and len(values) != size:
        raise GgufError(f"its metadata {key} has {len(values)} items for {size} tokens")
    return values


def _special_ids(metadata: Mapping[str, Any], kind: str, size: int) -> dict[str, int]:
    """The ids of the special tokens with a key, and the usual ones of the kind."""
    special = {name: number for name, number in _DEFAULT_IDS.get(kind, {}).items() if number < size}
    for name, key in _ID_KEYS.items():
        value = metadata.get(key)
        if value is None or value in _NO_IDS:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise GgufError(f"its metadata {key} is no integer")
        if 0 <= value < size:
            special[name] = value
        else:
            # As llama.cpp does: padding tokens of many files were never added to their vocabulary.
            log.warning("%s is %d, but the vocabulary has %d tokens: it is ignored", key, value, size)
    return special


def _special_tokens(metadata: Mapping[str, Any], ids: Mapping[str, int], size: int) -> SpecialTokens:
    """The special tokens; `ids` has at least the searched texts of the vocabulary."""
    special = _special_ids(metadata, text_value(metadata, _KEYS.MODEL), size)
    controls = _known(ids, _END_NAMES)
    for name, texts in _NAMED.items():
        token = next((ids[text] for text in texts if text in ids), None)
        if name not in special and token is not None:
            special[name] = token
            controls.add(token)
    ends = _known(ids, _END_NAMES) | {special[key] for key in _END_KEYS if key in special}
    # In the formats of gpt-oss and Solar, <|end|> ends a message; in that of Gemma 4, </s> is plain text.
    calls, returns = _known(ids, ("<|call|>", "<|calls|>")), _known(ids, ("<|return|>", "<|flush|>"))
    if ends & calls and ends & returns:
        ends -= _known(ids, ("<|end|>",))
    plain = _known(ids, ("</s>",)) if "<|tool_response>" in ids else set[int]()
    return SpecialTokens(size, special, frozenset(ends - plain), frozenset(controls), frozenset(plain))


def _known(ids: Mapping[str, int], texts: Iterable[str]) -> set[int]:
    return {ids[text] for text in texts if text in ids}


def _stripping(
    metadata: Mapping[str, Any], ids: Mapping[str, int], types: Sequence[TokenType]
) -> tuple[frozenset[int], frozenset[int]]:
    """The added tokens that absorb spaces before and after them, which no key of the file says."""
    architecture = text_value(metadata, Keys.General.ARCHITECTURE, "")
    pre = text_value(metadata, _KEYS.PRE, "")
    if architecture in _MASK_MODELS or pre in _MASK_PRE_TOKENIZERS:
        return frozenset(_known(ids, ("<mask>",))), frozenset()
    name = text_value(metadata, Keys.General.NAME, "").lower()
    if not any(part in name for part in _STRIPPED_MODELS):
        return frozenset(), frozenset()
    added = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    stripped = {token for token, kind in enumerate(types) if kind in added} | _known(ids, ("</s>",))
    return frozenset(), frozenset(stripped - _known(ids, _NOT_STRIPPED))
