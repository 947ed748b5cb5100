"""Incremental detokenization: bytes of an incomplete character are buffered, for every kind of tokenizer.

Most tokens are whole characters; the tokenizer decodes them after the previous tokens, on which their text depends. The
other tokens (byte-level BPE, byte fallback) are raw bytes and are decoded here, because tokenizers decode a run of byte
tokens to U+FFFD while one of its characters is incomplete.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from os.path import commonprefix
from typing import Any, Protocol

from transformers import PreTrainedTokenizerFast

from engine.text.regex_limit import RegexLimit
from engine.text.vocabulary import VocabularySummary

_REPLACEMENT = "\ufffd"
# With byte fallback each invalid byte becomes a U+FFFD, as in SentencePiece: Python's escapes of single bytes.
_ESCAPES_TO_REPLACEMENT = {0xDC00 + byte: _REPLACEMENT for byte in range(0x80, 0x100)}
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Tokens of one call of `decode_batch`, which releases the GIL.
_BATCH_TOKENS = 4096
# Last tokens of the prompt, on which the text of the first output token depends.
_PROMPT_TAIL_TOKENS = 6
# Tokens decoded before the next one, until the context is reset, which takes a call of `decode`.
_CONTEXT_TOKENS = 5
# The same for tokens without text so far, as spaces of a tokenizer that strips them.
_MAX_CONTEXT_TOKENS = 64


class Detokenizer(Protocol):
    """Decodes a stream of tokens.

    skipped_tokens  tokens without text
    """

    skipped_tokens: frozenset[int]

    def push(self, token: int) -> str:
        """The characters that this token completes, possibly none."""

    def flush(self) -> str:
        """The replacement characters of an incomplete character at the end."""


class TokenBytes:
    """Bytes and text of single tokens. Belongs to the thread that owns the tokenizer.

    special_tokens  tokens without text, unless special tokens are included
    anchor          a token with one letter, without a space, as context for other tokens; None if there is none
    """

    def __init__(self, tokenizer: Any, vocabulary: VocabularySummary) -> None:
        self._tokenizer = tokenizer
        self._decode, self._regex_limit = _decode_function(tokenizer), RegexLimit("tokens")
        self._size = vocabulary.size
        self._is_fast = _decodes_in_rust(tokenizer)
        self._byte_level = self._is_fast and _is_byte_level(tokenizer.backend_tokenizer)
        self._raw_bytes: dict[int, bytes | None] = {}
        bytes_of_character = () if self._is_fast else _latin_bytes(tokenizer)
        self._has_latin_bytes = bool(bytes_of_character) and self.decode(bytes_of_character) == "\x80"
        self._errors = "surrogateescape" if vocabulary.has_byte_tokens else "replace"
        if self._has_latin_bytes and not self.decode(bytes_of_character[:1]):
            self._errors = "ignore"
        self.special_tokens = _special_tokens(tokenizer)
        self.anchor = None if self._byte_level else self._find_anchor(vocabulary.letters)
        self._anchor_prefix = self._anchor_suffix = ""
        if self.anchor is not None:
            self._anchor_prefix = self.decode([self.anchor])
            self._anchor_suffix = self.decode([self.anchor, self.anchor])[len(self._anchor_prefix) :]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included; invalid ids have no text."""
        if self._is_fast:
            with self._regex_limit:
                return self._decode(list(tokens))
        return self._decode([token for token in tokens if 0 <= token < self._size])

    def raw_bytes(self, token: int) -> bytes | None:
        """The bytes of a token that may be part of a character; None for a token of whole characters."""
        if token not in self._raw_bytes:
            self._raw_bytes[token] = self._find_raw_bytes(token)
        return self._raw_bytes[token]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""
        if self._is_fast:
            with RegexLimit("prompt"):
                return list(self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def is_token(self, token: int) -> bool:
        """Whether the id has a token: the embedding of a model may have more rows than the vocabulary has tokens."""
        return 0 <= token < self._size and self._tokenizer.convert_ids_to_tokens(token) is not None

    def token_text(self, token: int) -> str:
        """The text of a token inside a text; U+FFFD for part of a character."""
        raw = self.raw_bytes(token)
        if raw is not None:
            return (self.decode_incomplete(raw) or _REPLACEMENT) if raw else ""
        if self.anchor is None:
            return self.decode([token])
        return self._strip_anchors(self.decode([self.anchor, token, self.anchor]), token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token inside a text."""
        raw = self.raw_bytes(token)
        return self.token_text(token).encode() if raw is None else raw

    def all_token_bytes(self, pieces: Mapping[int, str], start: int, stop: int) -> list[bytes]:
        """The bytes of the tokens [start, stop), by id; empty for ids without a token."""
        all_bytes = [b""] * (stop - start)
        text_tokens = []
        for token, piece in pieces.items():
            raw = self._piece_bytes(token, piece)
            if raw is None:
                text_tokens.append(token)
            else:
                all_bytes[token - start] = raw
        for first in range(0, len(text_tokens), _BATCH_TOKENS):
            tokens = text_tokens[first : first + _BATCH_TOKENS]
            for token, text in zip(tokens, self._token_texts(tokens), strict=True):
                all_bytes[token - start] = text.encode()
        return all_bytes

    def _token_texts(self, tokens: Sequence[int]) -> list[str]:
        """The texts of tokens of whole characters, inside a text."""
        if self.anchor is None or not self._is_fast:
            return [self.token_text(token) for token in tokens]
        anchored = self._tokenizer.backend_tokenizer.decode_batch(
            [[self.anchor, token, self.anchor] for token in tokens], skip_special_tokens=False
        )
        return [self._strip_anchors(text, token) for text, token in zip(anchored, tokens, strict=True)]

    def decode_incomplete(self, raw: bytes) -> str:
        """The text of bytes; invalid and incomplete characters are U+FFFD, or left out by tokenizers that do so."""
        return raw.decode(errors=self._errors).translate(_ESCAPES_TO_REPLACEMENT)

    def new_utf8_decoder(self) -> codecs.IncrementalDecoder:
        """A new decoder of raw bytes; it escapes or replaces invalid bytes."""
        return codecs.getincrementaldecoder("utf-8")(self._errors)

    def _strip_anchors(self, text: str, token: int) -> str:
        """The text of a token, from its text between two anchors."""
        if text.startswith(self._anchor_prefix) and text.endswith(self._anchor_suffix):
            return text[len(self._anchor_prefix) : len(text) - len(self._anchor_suffix)]
        return self.decode([token])

    def _find_raw_bytes(self, token: int) -> bytes | None:
        piece = self._tokenizer.convert_ids_to_tokens(token) if 0 <= token < self._size else None
        return self._piece_bytes(token, piece) if isinstance(piece, str) else None

    def _piece_bytes(self, token: int, piece: str) -> bytes | None:
        if self._has_latin_bytes:
            # ByT5, Perceiver: the piece of a byte is the character of this number.
            return piece.encode("latin-1") if len(piece) == 1 and piece < "\u0100" else None
        if self._byte_level:
            return piece.encode() if (raw := _byte_level_bytes(piece)) is None else raw
        if piece.isascii():
            raw = bytes([int(match[1], 16)]) if (match := _BYTE_FALLBACK.fullmatch(piece)) else None
        else:
            raw = _byte_level_bytes(piece)
        # Many pieces could be byte letters by chance: a byte token decodes to U+FFFD alone.
        return None if raw is None or _is_text(raw) or _REPLACEMENT not in self.decode([token]) else raw

    def _find_anchor(self, letters: Sequence[int]) -> int | None:
        """A letter, which no tokenizer strips; preferably one that decodes twice to two letters without a space."""
        twice = {token: (self.decode([token]), self.decode([token, token])) for token in letters}
        joined = [
            token
            for token, (single, double) in twice.items()
            if len(single) < len(double) and double[len(single) :].isalpha()
        ]
        spaced = [token for token, (single, double) in twice.items() if double == f"{single} {single}"]
        return next(iter((*joined, *spaced)), None)


class IncrementalDetokenizer:
    """The text of tokens after a prompt; a character is returned with the token that completes it.

    The concatenated text equals the text of prompt and tokens without its common prefix with the text of the prompt.
    """

    def __init__(self, token_bytes: TokenBytes, prompt: Sequence[int], *, special: bool) -> None:
        self._token_bytes = token_bytes
        self.skipped_tokens = frozenset() if special else token_bytes.special_tokens
        # Tokens decoded before the next one, and their text.
        self._context: tuple[int, ...] = ()
        self._context_text = ""
        self._utf8_decoder = token_bytes.new_utf8_decoder()
        # The replacement characters of an incomplete character at the end of the prompt.
        self._prompt_remainder = ""
        self._push_prompt_tail(prompt)

    def push(self, token: int) -> str:
        """The characters that this token completes."""
        if token in self.skipped_tokens:
            return ""
        raw = self._token_bytes.raw_bytes(token)
        if raw is None:
            return self._flush_bytes() + self._push_text_token(token)
        return self._close_context() + self._without_remainder(self._utf8_decoder.decode(raw))

    def flush(self) -> str:
        """U+FFFD for an incomplete character."""
        return self._flush_bytes()

    def _push_prompt_tail(self, prompt: Sequence[int]) -> None:
        """Set the context to the last tokens of the prompt."""
        tail: list[int] = []
        for token in reversed(prompt):
            if len(tail) == _PROMPT_TAIL_TOKENS:
                self._reset_context()
                break
            if token not in self.skipped_tokens and self._token_bytes.is_token(token):
                tail.append(token)
        for token in reversed(tail):
            self.push(token)
        self._prompt_remainder = self._token_bytes.decode_incomplete(self._utf8_decoder.getstate()[0])

    def _flush_bytes(self) -> str:
        """Replacement characters for buffered bytes."""
        return self._without_remainder(self._utf8_decoder.decode(b"", final=True))

    def _without_remainder(self, decoded: str) -> str:
        """Decoded bytes without replacement characters that the text of the prompt has already."""
        text = decoded.translate(_ESCAPES_TO_REPLACEMENT)
        if text and self._prompt_remainder:
            text, self._prompt_remainder = _new_text(self._prompt_remainder, text), ""
        return text

    def _push_text_token(self, token: int) -> str:
        """The text of a token of whole characters after the context."""
        context = (*self._context, token)
        text = self._token_bytes.decode(context)
        released = _new_text(self._context_text, text)
        if len(context) > (_CONTEXT_TOKENS if released else _MAX_CONTEXT_TOKENS):
            self._reset_context(token)
        else:
            self._context, self._context_text = context, text
        return released

    def _close_context(self) -> str:
        """Text between the context and a byte token, for example a space, found with the anchor in its place."""
        separator, anchor = "", self._token_bytes.anchor
        if anchor is not None and self._context != (anchor,):
            separator = self._push_text_token(anchor)[:-1] if self._context else ""
            self._reset_context()
        return separator

    def _reset_context(self, *tokens: int) -> None:
        """Set the context to the anchor and `tokens`."""
        anchor = self._token_bytes.anchor
        self._context = tokens if anchor is None else (anchor, *tokens)
        self._context_text = self._token_bytes.decode(self._context)


def _new_text(before: str, text: str) -> str:
    """The text after its common prefix with another one."""
    return text[len(before if text.startswith(before) else commonprefix((before, text))) :]


def detokenize(token_bytes: TokenBytes, tokens: Sequence[int]) -> str:
    """The text of tokens, special ones included, decoded one by one."""
    detokenizer = IncrementalDetokenizer(token_bytes, (), special=True)
    return "".join(map(detokenizer.push, tokens)) + detokenizer.flush()


def _decodes_in_rust(tokenizer: Any) -> bool:
    """Whether transformers decodes exactly like the tokenizers library underneath."""
    return bool(tokenizer.is_fast) and type(tokenizer)._decode is PreTrainedTokenizerFast._decode


def _decode_function(tokenizer: Any) -> Callable[[list[int]], str]:
    """The fastest equivalent of `tokenizer.decode`."""
    if _decodes_in_rust(tokenizer):
        return functools.partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=False)
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return lambda tokens: str(tokenizer.decode(tokens, **options))


def _special_tokens(tokenizer: Any) -> frozenset[int]:
    """The tokens that `skip_special_tokens` skips."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {number for number, token in added.items() if getattr(token, "special", False)}
    return frozenset(marked if tokenizer.is_fast else tokenizer.all_special_ids)


def _is_byte_level(backend: Any) -> bool:
    """Whether the letters of each token encode its bytes (GPT-2), independently of other tokens."""
    return backend.decoder is not None and json.loads(backend.decoder.__getstate__()).get("type") == "ByteLevel"


def _latin_bytes(tokenizer: Any) -> tuple[int, ...]:
    """The tokens of the two bytes of U+0080, if the pieces of bytes are the characters of their numbers; else none."""
    vocabulary = tokenizer.get_vocab()
    return (vocabulary["\xc2"], vocabulary["\x80"]) if {"\xc2", "\x80"} <= vocabulary.keys() else ()


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _byte_level_bytes(piece: str) -> bytes | None:
    """The bytes of a piece of byte-level BPE; None for other pieces."""
    table = _byte_level_alphabet()
    try:
        return bytes([table[letter] for letter in piece])
    except KeyError:
        return None


@functools.cache
def _byte_level_alphabet() -> dict[str, int]:
    """The byte of each letter in byte-level BPE (GPT-2): printable bytes are themselves, others follow from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
