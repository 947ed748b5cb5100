"""Texts as the embedding model reads them, cut where that is wanted. For worker threads: its methods block."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from tokenizers.normalizers import Lowercase

from engine.embedder.layout import Layout
from engine.errors import ContextTooLong, InvalidRequest
from engine.types.request import EmbeddingInput

# What a purpose may be called besides, in order: as sentence-transformers, Cohere, Voyage and NVIDIA have it.
_PURPOSES = {
    "query": ("query", "search_query"),
    "document": ("document", "passage", "corpus", "search_document"),
}


class EmbeddingTokenizer:
    """One embedding model's tokenizer.

    max_length     tokens of a text, special ones included
    vocabulary  tokens there are
    """

    def __init__(self, tokenizer: Any, layout: Layout, *, vocabulary: int, longest: int) -> None:
        self._tokenizer, self._lowercase = tokenizer, layout.lower
        self._lock = threading.Lock()
        self._prompts, self._default_prompt = dict(layout.prompts), layout.default
        self._max_token_bytes = max(len(token.encode()) for token in tokenizer.get_vocab())
        self.max_length, self.vocabulary = longest, vocabulary
        self._prompt_lengths = {text: self._prompt_length(text) for text in self._prompts.values()}

    def prompt(self, purpose: str | None) -> str:
        """What is put before a text for a purpose; None: for no special one.

        A model need not have one for queries and documents. Raises InvalidRequest for others that it does not know.
        """
        if purpose is None:
            return "" if self._default_prompt is None else self._prompts[self._default_prompt]
        if purpose in self._prompts:
            return self._prompts[purpose]
        for names in _PURPOSES.values():
            if purpose in names:
                return next((self._prompts[name] for name in names if name in self._prompts), self.prompt(None))
        known = ", ".join(repr(name) for name in sorted({*_PURPOSES, *self._prompts}))
        raise InvalidRequest("input_type", f"this model has no prompt of this name; it knows {known}")

    def encode(self, text: str, *, prompt: str = "", max_tokens: int | None = None) -> EmbeddingInput:
        """A text behind its prompt. More tokens than `max_tokens` are cut off, so that special ones stay.

        Raises ContextTooLong, or InvalidRequest for what is no text.
        """
        tokens = self._tokenize(max_tokens, prompt + text)["input_ids"]
        return self._checked(EmbeddingInput(tuple(tokens), prompt_tokens=self._prompt_lengths.get(prompt, 0)))

    def encode_pair(self, query: str, document: str, *, max_tokens: int | None = None) -> EmbeddingInput:
        """Two texts as a ranker reads them. Raises as `text`."""
        read = self._tokenize(max_tokens, query, document)
        return self._checked(EmbeddingInput(tuple(read["input_ids"]), tuple(read.get("token_type_ids", ()))))

    def truncate(self, tokens: Sequence[int], *, max_tokens: int | None = None) -> EmbeddingInput:
        """Tokens as they are, cut to `max_tokens`. Raises ContextTooLong, or InvalidRequest for numbers that are none."""
        return self._checked(EmbeddingInput(tuple(tokens[:max_tokens])))

    def _tokenize(self, max_tokens: int | None, *texts: str) -> dict[str, list[int]]:
        size = sum(map(_size, texts))
        # Text that has too many tokens however it is cut stays unread; normalisers may shorten it, so four times goes.
        least = size // (4 * self._max_token_bytes)
        if max_tokens is None and least > self.max_length:
            raise ContextTooLong(least, self.max_length, exact=False)
        lower = [Lowercase().normalize_str(text) if self._lowercase else text for text in texts]
        with self._lock:
            read = self._tokenizer(*lower, truncation=max_tokens is not None, max_length=max_tokens, verbose=False)
        if max_tokens is not None and len(read["input_ids"]) > max_tokens:
            raise InvalidRequest(
                "truncate_prompt_tokens", f"{max_tokens} are too few for the special tokens of this model"
            )
        return {name: list(read[name]) for name in read}

    def _checked(self, read: EmbeddingInput) -> EmbeddingInput:
        if len(read.tokens) > self.max_length:
            raise ContextTooLong(len(read.tokens), self.max_length)
        if not all(0 <= token < self.vocabulary for token in read.tokens):
            raise InvalidRequest("input", f"a token of this model is a number from 0 to {self.vocabulary - 1}")
        return read

    def _prompt_length(self, prompt: str) -> int:
        """Tokens of a prompt with what stands before it, but without what stands behind a whole text."""
        tokens = self._tokenize(None, prompt)["input_ids"] if prompt else []
        return len(tokens) - (bool(tokens) and tokens[-1] in self._tokenizer.all_special_ids)


def _size(text: str) -> int:
    """Bytes of a text; raises InvalidRequest for half of a surrogate pair, on which tokenizers crash."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest("input", "a text holds half of a surrogate pair, which is no character") from error
