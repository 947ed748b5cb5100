"""Tokens to text, one by one: bytes of unfinished characters are held back, whatever kind of tokenizer wrote them.

A token is one of two things. Most tokens are whole characters: the tokenizer decodes them behind the token before,
because pieces depend on their neighbours. The others (byte-level BPE, byte fallback) are raw bytes: these become text
here, because a tokenizer turns a whole run of byte tokens into U+FFFD while one character of it is unfinished.
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

_REPLACEMENT = "\ufffd"
# Byte fallback shows each invalid byte as one U+FFFD, as SentencePiece does; Python escapes them one by one.
_ESCAPES_TO_REPLACEMENT = {0xDC00 + byte: _REPLACEMENT for byte in range(0x80, 0x100)}
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Tokens that are looked at for one that stands for any text before.
_MAX_ANCHOR_CANDIDATES = 4096
# Tokens that are decoded in one call, which lets other threads run.
_BATCH_TOKENS = 4096
# Tokens of the prompt that decide how its continuation is decoded.
_PROMPT_TAIL_TOKENS = 6
# Tokens that are decoded together with the next one before the first of them are let go: that takes a decoding, too.
_CONTEXT_TOKENS = 5
# Tokens without text that are decoded together with the next one. Spaces are such where ends are stripped.
_MAX_CONTEXT_TOKENS = 64


class Detokenizer(Protocol):
    """Turns tokens into text piece by piece."""

    def push(self, token: int) -> str:
        """The whole characters that this token completes; often its text, sometimes none."""

    def flush(self) -> str:
        """What is left of an unfinished character at the end, as decoding all tokens at once would show it."""


class TokenBytes:
    """The bytes and the text of single tokens. Belongs to the thread that owns the tokenizer.

    special_tokens  tokens that are left out of a text where special tokens are not shown
    anchor   a token that is a letter in the middle of a word, and stands for any text before; None: there is none
    """

    def __init__(self, tokenizer: Any, vocabulary: Mapping[str, int]) -> None:
        self._tokenizer = tokenizer
        self._decode = _decode_function(tokenizer)
        self._size = 1 + max(vocabulary.values(), default=0)
        self._is_fast = _decodes_in_rust(tokenizer)
        self._byte_level = self._is_fast and _is_byte_level(tokenizer.backend_tokenizer)
        self._raw_bytes: dict[int, bytes | None] = {}
        self._errors = "surrogateescape" if "<0xFF>" in vocabulary else "replace"
        self.special_tokens = _special_tokens(tokenizer)
        self.anchor = None if self._byte_level else self._find_anchor(vocabulary)
        self._anchor_prefix = self._anchor_suffix = ""
        if self.anchor is not None:
            self._anchor_prefix = self.decode([self.anchor])
            self._anchor_suffix = self.decode([self.anchor, self.anchor])[len(self._anchor_prefix) :]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones too; numbers that are no tokens have none."""
        if self._is_fast:
            return self._decode(list(tokens))
        return self._decode([token for token in tokens if 0 <= token < self._size])

    def raw_bytes(self, token: int) -> bytes | None:
        """The bytes of a token that may be a part of a character; None: it is whole characters."""
        if token not in self._raw_bytes:
            self._raw_bytes[token] = self._find_raw_bytes(token)
        return self._raw_bytes[token]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens around it."""
        if self._is_fast:
            return list(self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def is_token(self, token: int) -> bool:
        """Whether the number is a token: a model may have more rows than its tokenizer has tokens."""
        return 0 <= token < self._size and self._tokenizer.convert_ids_to_tokens(token) is not None

    def token_text(self, token: int) -> str:
        """The text of a token in the middle of a text; U+FFFD for parts of characters."""
        raw = self.raw_bytes(token)
        if raw is not None:
            return self.decode_incomplete(raw)
        if self.anchor is None:
            return self.decode([token])
        return self._strip_anchors(self.decode([self.anchor, token, self.anchor]), token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token in the middle of a text."""
        raw = self.raw_bytes(token)
        return self.token_text(token).encode() if raw is None else raw

    def all_token_bytes(self, pieces: Mapping[int, str], size: int) -> list[bytes]:
        """The bytes of these tokens, and of at least `size`; numbers that are no tokens have none."""
        found = [b""] * max(size, 1 + max(pieces, default=0))
        whole = []
        for token, piece in pieces.items():
            raw = self._piece_bytes(token, piece)
            if raw is None:
                whole.append(token)
            else:
                found[token] = raw
        for start in range(0, len(whole), _BATCH_TOKENS):
            tokens = whole[start : start + _BATCH_TOKENS]
            for token, text in zip(tokens, self._token_texts(tokens), strict=True):
                found[token] = text.encode()
        return found

    def _token_texts(self, tokens: Sequence[int]) -> list[str]:
        """The texts of tokens of whole characters, in the middle of a text."""
        if self.anchor is None or not self._is_fast:
            return [self.token_text(token) for token in tokens]
        framed = self._tokenizer.backend_tokenizer.decode_batch(
            [[self.anchor, token, self.anchor] for token in tokens], skip_special_tokens=False
        )
        return [self._strip_anchors(text, token) for text, token in zip(framed, tokens, strict=True)]

    def decode_incomplete(self, raw: bytes) -> str:
        """The text of bytes that end here, with U+FFFD for what is no character."""
        return raw.decode(errors=self._errors).translate(_ESCAPES_TO_REPLACEMENT)

    def new_utf8_decoder(self) -> codecs.IncrementalDecoder:
        """A new decoder of raw bytes; it escapes what is no character, or replaces it."""
        return codecs.getincrementaldecoder("utf-8")(self._errors)

    def _strip_anchors(self, text: str, token: int) -> str:
        """The text of a token, from its own between two anchors."""
        if text.startswith(self._anchor_prefix) and text.endswith(self._anchor_suffix):
            return text[len(self._anchor_prefix) : len(text) - len(self._anchor_suffix)]
        return self.decode([token])

    def _find_raw_bytes(self, token: int) -> bytes | None:
        piece = self._tokenizer.convert_ids_to_tokens(token) if 0 <= token < self._size else None
        return self._piece_bytes(token, piece) if isinstance(piece, str) else None

    def _piece_bytes(self, token: int, piece: str) -> bytes | None:
        if self._byte_level:
            return piece.encode() if (raw := _byte_level_bytes(piece)) is None else raw
        if piece.isascii():
            raw = bytes([int(found[1], 16)]) if (found := _BYTE_FALLBACK.fullmatch(piece)) else None
        else:
            raw = _byte_level_bytes(piece)
        # Bytes that are text by themselves are not asked for: many pieces can be read as letters of bytes, too.
        return None if raw is None or _is_text(raw) or _REPLACEMENT not in self.decode([token]) else raw

    def _find_anchor(self, vocabulary: Mapping[str, int]) -> int | None:
        """A letter, so that nothing is stripped of it; if possible one that two of are two letters, without a space."""
        likely = sorted(number for piece, number in vocabulary.items() if _is_letter(piece))[:_MAX_ANCHOR_CANDIDATES]
        twice = {token: (self.decode([token]), self.decode([token, token])) for token in likely}
        inner = [token for token, (one, two) in twice.items() if len(one) < len(two) and two[len(one) :].isalpha()]
        apart = [token for token, (one, two) in twice.items() if two == f"{one} {one}"]
        return next(iter((*inner, *apart)), None)


class IncrementalDetokenizer:
    """The text of a growing list of tokens behind a prompt. A character comes out whole, with the token that ends it.

    All pieces together are the text of prompt and tokens, less what it has in common with the text of the prompt.
    """

    def __init__(self, token_bytes: TokenBytes, prompt: Sequence[int], *, special: bool) -> None:
        self._token_bytes = token_bytes
        self._skipped_tokens = frozenset() if special else token_bytes.special_tokens
        # Tokens that the next one is decoded behind, and their text.
        self._context: tuple[int, ...] = ()
        self._context_text = ""
        self._utf8_decoder = token_bytes.new_utf8_decoder()
        # What the text of the prompt ends in, where that is a part of a character.
        self._prompt_remainder = ""
        self._push_prompt_tail(prompt)

    def push(self, token: int) -> str:
        """The whole characters that this token completes."""
        if token in self._skipped_tokens:
            return ""
        raw = self._token_bytes.raw_bytes(token)
        if raw is None:
            return self._flush_bytes() + self._push_text_token(token)
        return self._close_context() + self._without_remainder(
            self._utf8_decoder.decode(raw).translate(_ESCAPES_TO_REPLACEMENT)
        )

    def flush(self) -> str:
        """The rest, with U+FFFD for what is unfinished."""
        return self._flush_bytes()

    def _push_prompt_tail(self, prompt: Sequence[int]) -> None:
        """Stand behind a prompt; its last tokens are enough for that."""
        tail: list[int] = []
        for token in reversed(prompt):
            if len(tail) == _PROMPT_TAIL_TOKENS:
                self._reset_context()
                break
            if token not in self._skipped_tokens and self._token_bytes.is_token(token):
                tail.append(token)
        for token in reversed(tail):
            self.push(token)
        self._prompt_remainder = self._token_bytes.decode_incomplete(self._utf8_decoder.getstate()[0])

    def _flush_bytes(self) -> str:
        """What raw bytes there are that never became a character."""
        return self._without_remainder(self._utf8_decoder.decode(b"", final=True).translate(_ESCAPES_TO_REPLACEMENT))

    def _without_remainder(self, text: str) -> str:
        """Text of raw bytes, less the part of it that the prompt ended in."""
        if text and self._prompt_remainder:
            text, self._prompt_remainder = _new_text(self._prompt_remainder, text), ""
        return text

    def _push_text_token(self, token: int) -> str:
        """The text of a token of whole characters, behind the context."""
        context = (*self._context, token)
        text = self._token_bytes.decode(context)
        released = _new_text(self._context_text, text)
        if len(context) > (_CONTEXT_TOKENS if released else _MAX_CONTEXT_TOKENS):
            self._reset_context(token)
        else:
            self._context, self._context_text = context, text
        return released

    def _close_context(self) -> str:
        """What text the context gains by a letter behind it, which is a character of raw bytes in truth."""
        between, anchor = "", self._token_bytes.anchor
        if anchor is not None and self._context != (anchor,):
            between = self._push_text_token(anchor)[:-1] if self._context else ""
            self._reset_context()
        return between

    def _reset_context(self, *tokens: int) -> None:
        """Let these be the context, with text before it."""
        anchor = self._token_bytes.anchor
        self._context = tokens if anchor is None else (anchor, *tokens)
        self._context_text = self._token_bytes.decode(self._context)


def _new_text(before: str, text: str) -> str:
    """What a text has behind the part that it has in common with another."""
    return text[len(before if text.startswith(before) else commonprefix((before, text))) :]


def detokenize(token_bytes: TokenBytes, tokens: Sequence[int]) -> str:
    """The text of tokens, special ones too, as it comes out one by one."""
    growing = IncrementalDetokenizer(token_bytes, (), special=True)
    return "".join(map(growing.push, tokens)) + growing.flush()


def _decodes_in_rust(tokenizer: Any) -> bool:
    """Whether the layers of transformers add nothing but time to how the tokenizers library decodes."""
    return bool(tokenizer.is_fast) and type(tokenizer)._decode is PreTrainedTokenizerFast._decode


def _decode_function(tokenizer: Any) -> Callable[[list[int]], str]:
    """How a tokenizer decodes."""
    if _decodes_in_rust(tokenizer):
        return functools.partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=False)
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return lambda tokens: str(tokenizer.decode(tokens, **options))


def _special_tokens(tokenizer: Any) -> frozenset[int]:
    """The tokens that decoding leaves out where special ones are skipped."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {number for number, token in added.items() if getattr(token, "special", False)}
    return frozenset(marked if tokenizer.is_fast else tokenizer.all_special_ids)


def _is_byte_level(backend: Any) -> bool:
    """Whether a token is the bytes that its letters stand for (GPT-2), and nothing else decides its text."""
    return backend.decoder is not None and json.loads(backend.decoder.__getstate__()).get("type") == "ByteLevel"


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_letter(text: str) -> bool:
    # The last character first: it decides for most of a large vocabulary.
    return text[-1:].isascii() and text[-1:].isalpha() and len(text.lstrip("#")) == 1


def _byte_level_bytes(piece: str) -> bytes | None:
    """The bytes that a piece of byte-level BPE stands for; None: it is none."""
    table = _byte_level_alphabet()
    try:
        return bytes([table[letter] for letter in piece])
    except KeyError:
        return None


@functools.cache
def _byte_level_alphabet() -> dict[str, int]:
    """The letters in which byte-level BPE (GPT-2) writes bytes: printable ones as themselves, others from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
