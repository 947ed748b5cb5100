"""The tokenizer of a GGUF file, built from its metadata as a fast tokenizer of transformers.

kind (tokenizer.ggml.model)   model of the tokenizers library
llama                         BPE with byte fallback over text with U+2581 for spaces; merges follow from scores
gpt2, gemma4                  BPE with the merges and the pre-tokenizer of the file
bert                          WordPiece
t5                            Unigram

Control tokens and user-defined tokens are added tokens: they are found in a text before it is normalised. Control
tokens are special.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, Literal

from gguf import Keys, TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from engine.gguf.charsmap import checked_charsmap
from engine.gguf.chat_template import read_chat_template
from engine.gguf.container import GgufError
from engine.gguf.merge_file import cached_merges
from engine.gguf.merges import parse_merges
from engine.gguf.pre_tokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer
from engine.gguf.vocabulary import Vocabulary, flag, read_vocabulary, strings, text_value

log = logging.getLogger("cellar.engine")

_KEYS = Keys.Tokenizer
_SPACE = "\u2581"
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_ADDED = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
# Kinds of byte pairs that name a pre-tokenizer.
_OWN_PRE_TOKENIZERS = {"gemma4": "gemma4"}
_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "mask")
# Longest word of BERT in characters; longer ones become the unknown token.
_MAX_WORD_CHARACTERS = 100


def read_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer of a file with its chat templates. Raises GgufError."""
    vocabulary = read_vocabulary(metadata)
    backend = _backend(vocabulary, metadata)
    _add_tokens(backend, vocabulary)
    special = vocabulary.special
    names = {f"{name}_token": _added_token(vocabulary, special[name]) for name in _SPECIAL_NAMES if name in special}
    if vocabulary.kind == "bert":
        names["cls_token"] = names.pop("bos_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=_Uncopied(backend),
        clean_up_tokenization_spaces=False,
        chat_template=read_chat_template(metadata),
        **names,
    )


class _Uncopied:
    """A backend that transformers does not copy: a copy of 262,144 tokens takes as long as their merges."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: object) -> Tokenizer:
        return self._backend


def _backend(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer without added tokens. Raises GgufError for an unsupported kind."""
    match vocabulary.kind:
        case "llama":
            return _sentencepiece(vocabulary, metadata)
        case "gpt2" | "gemma4":
            return _byte_pairs(vocabulary, metadata)
        case "bert":
            return _word_pieces(vocabulary, metadata)
        case "t5":
            return _unigram(vocabulary, metadata)
    raise GgufError(f"its tokenizer is of the kind {vocabulary.kind!r}, which is not supported")


def _sentencepiece(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    if not vocabulary.scores:
        raise GgufError(f"its metadata lacks {_KEYS.SCORES}")
    mergeable = vocabulary.with_types(TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    merges = cached_merges(vocabulary, mergeable)
    add_space = flag(metadata, _KEYS.ADD_PREFIX, True)
    backend = _with_byte_fallback(vocabulary, merges, strip=add_space)
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(_SPACE)] if add_space else []), normalizers.Replace(" ", _SPACE)]
    )
    _add_bos_and_eos(backend, vocabulary, metadata, bos=True, eos=False)
    return backend


def _byte_pairs(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    pre_tokenizer = _pre_tokenizer(vocabulary, metadata)
    merges = parse_merges(strings(metadata, _KEYS.MERGES), vocabulary.ids, _KEYS.MERGES)
    if pre_tokenizer.byte_level:
        backend = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=pre_tokenizer.ignore_merges))
        backend.decoder = decoders.ByteLevel()
        last = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        backend, last = _with_byte_fallback(vocabulary, merges, strip=False), []
        backend.normalizer = normalizers.Replace(" ", _SPACE)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre_tokenizer.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, *last])
    _add_bos_and_eos(backend, vocabulary, metadata, bos=pre_tokenizer.add_bos, eos=False)
    return backend


def _pre_tokenizer(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> PreTokenizer:
    name = _OWN_PRE_TOKENIZERS.get(vocabulary.kind) or text_value(metadata, _KEYS.PRE, "")
    if not name:
        log.warning("the file names no pre-tokenizer (%s): its text may be split wrongly", _KEYS.PRE)
        return DEFAULT
    if name not in PRE_TOKENIZERS:
        raise GgufError(f"its pre-tokenizer {_KEYS.PRE} is {name!r}, which is not supported")
    return PRE_TOKENIZERS[name]


def _with_byte_fallback(vocabulary: Vocabulary, merges: list[tuple[str, str]], *, strip: bool) -> Tokenizer:
    """A byte-pair model over text with U+2581 for spaces; characters without a token become byte tokens.

    strip  the decoder removes a space at the start
    """
    fallback = all(text in vocabulary.ids for text in _BYTES)
    unknown = vocabulary.text("unk")
    model = models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=fallback)
    backend = Tokenizer(model)
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    return backend


def _word_pieces(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    texts = [_word_piece(text, kind) for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)]
    pieces = {text: token for token, text in enumerate(texts)}
    unknown = texts[_required(vocabulary, "unk")]
    if len(pieces) < len(vocabulary.tokens):
        raise GgufError(f"its vocabulary {_KEYS.LIST} has a word twice")
    backend = Tokenizer(models.WordPiece(pieces, unk_token=unknown, max_input_chars_per_word=_MAX_WORD_CHARACTERS))
    lowercase = flag(metadata, "tokenizer.ggml.normalizer.lowercase", True)
    strip_accents = flag(metadata, "tokenizer.ggml.normalizer.strip_accents", lowercase)
    backend.normalizer = normalizers.BertNormalizer(strip_accents=strip_accents, lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    _frame(backend, vocabulary, ["bos"], ["sep"])
    return backend


def _word_piece(text: str, kind: TokenType) -> str:
    """A token of a file in the spelling of BERT: files mark the first piece of a word, BERT the others."""
    if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
        return text
    return text.removeprefix(_SPACE) if text.startswith(_SPACE) else f"##{text}"


def _unigram(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    if not vocabulary.scores:
        raise GgufError(f"its metadata lacks {_KEYS.SCORES}")
    pairs = list(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    backend = Tokenizer(models.Unigram(pairs, unk_id=_required(vocabulary, "unk"), byte_fallback=False))
    backend.normalizer = normalizers.Sequence(_unigram_normalizers(metadata))
    scheme: Literal["always", "never"] = "always" if flag(metadata, _KEYS.ADD_PREFIX, True) else "never"
    controls = [vocabulary.tokens[token] for token in vocabulary.with_types(TokenType.CONTROL, TokenType.UNKNOWN)]
    # The model would take a control token's text for the token itself: its last character becomes a separate part.
    apart = [pre_tokenizers.Split(Regex(_last_characters(controls)), "isolated")] if controls else []
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=True), *apart]
    )
    backend.decoder = decoders.Metaspace(_SPACE, prepend_scheme=scheme, split=True)
    _add_bos_and_eos(backend, vocabulary, metadata, bos=False, eos=True)
    return backend


def _unigram_normalizers(metadata: Mapping[str, Any]) -> list[Any]:
    steps: list[Any] = []
    if (charsmap := metadata.get(_KEYS.PRECOMPILED_CHARSMAP)) is not None:
        steps.append(normalizers.Precompiled(checked_charsmap(charsmap, _KEYS.PRECOMPILED_CHARSMAP)))
    if flag(metadata, _KEYS.REMOVE_EXTRA_WS, False):
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    return steps


def _last_characters(texts: list[str]) -> str:
    """A regular expression of the last character of each text, where it follows the others."""
    return "|".join(f"(?<={re.escape(text[:-1])}){re.escape(text[-1])}" for text in texts if len(text) > 1)


def _add_bos_and_eos(
    backend: Tokenizer, vocabulary: Vocabulary, metadata: Mapping[str, Any], *, bos: bool, eos: bool
) -> None:
    """Let BOS and EOS frame each text as the file has it; the flags are the defaults of its kind."""
    defaults = {"bos": (_KEYS.ADD_BOS, bos), "eos": (_KEYS.ADD_EOS, eos)}
    added = [
        name for name, (key, default) in defaults.items() if flag(metadata, key, default and name in vocabulary.special)
    ]
    _frame(backend, vocabulary, [name for name in added if name == "bos"], [name for name in added if name == "eos"])


def _frame(backend: Tokenizer, vocabulary: Vocabulary, first: list[str], last: list[str]) -> None:
    """Let special tokens precede and follow each text."""
    special = [
        {"id": name, "ids": [_required(vocabulary, name)], "tokens": [vocabulary.text(name)]}
        for name in dict.fromkeys((*first, *last))
    ]
    single = [*(f"{name}:0" for name in first), "$A:0", *(f"{name}:0" for name in last)]
    pair = [*single, *(f"{name}:1" for name in first), "$B:1", *(f"{name}:1" for name in last)]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


def _required(vocabulary: Vocabulary, name: str) -> int:
    """The id of a special token. Raises GgufError if there is none."""
    if name not in vocabulary.special:
        raise GgufError(f"its tokenizer needs the {name.upper()} token, which its vocabulary lacks")
    return vocabulary.special[name]


def _add_tokens(backend: Tokenizer, vocabulary: Vocabulary) -> None:
    """Let control tokens and user-defined tokens be found in a text before all others."""
    added = [
        token for token in vocabulary.with_types(*_ADDED) if backend.token_to_id(vocabulary.tokens[token]) == token
    ]
    # One call for each of the two: a call rebuilds the table of all added tokens.
    backend.add_special_tokens([_added_token(vocabulary, token) for token in added if _is_special(vocabulary, token)])
    backend.add_tokens([_added_token(vocabulary, token) for token in added if not _is_special(vocabulary, token)])


def _is_special(vocabulary: Vocabulary, token: int) -> bool:
    return bool(vocabulary.types[token] != TokenType.USER_DEFINED)


def _added_token(vocabulary: Vocabulary, token: int) -> AddedToken:
    return AddedToken(
        vocabulary.tokens[token],
        lstrip=token in vocabulary.lstrip,
        rstrip=token in vocabulary.rstrip,
        normalized=False,
        special=_is_special(vocabulary, token),
    )
