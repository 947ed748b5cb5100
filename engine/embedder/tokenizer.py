"""Tokenises the inputs of the embedding model, with truncation. Its methods block: for worker threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.normalizers import Lowercase

from engine.embedder.layout import Layout
from engine.errors import ContextTooLong, InvalidRequest
from engine.text.regex_limit import RegexLimit
from engine.types.request import EmbeddingInput
from engine.watchdog import WatchedLock

# Accepted names of each purpose, in order, from sentence-transformers, Cohere, Voyage and NVIDIA.
_PURPOSES = {
    "query": ("query", "search_query"),
    "document": ("document", "passage", "corpus", "search_document"),
}


class EmbeddingTokenizer:
    """The tokenizer of one embedding model.

    max_length  tokens of a text, with special tokens
    vocabulary  number of tokens
    """

    def __init__(self, tokenizer: Any, layout: Layout, *, vocabulary: int, max_length: int) -> None:
        self._tokenizer, self._lowercase = tokenizer, layout.lowercase
        self._lock = WatchedLock()
        self._prompts, self._default_prompt = dict(layout.prompts), layout.default_prompt
        self._max_token_bytes = max(len(token.encode(errors="surrogatepass")) for token in tokenizer.get_vocab())
        self.max_length, self.vocabulary = max_length, vocabulary
        self._prompt_lengths = {text: self._prompt_length(text) for text in self._prompts.values()}

    def is_stuck(self) -> bool:
        """Observe the worker threads; whether one has been in the tokenizer for minutes."""
        return self._lock.is_stuck()

    def prompt(self, purpose: str | None) -> str:
        """The prefix of a text for a purpose; None: the default prompt.

        A model may lack prompts for queries and documents. Raises InvalidRequest for other purposes that it lacks.
        """
        if purpose is None:
            return "" if self._default_prompt is None else self._prompts[self._default_prompt]
        if purpose in self._prompts:
            return self._prompts[purpose]
        for names in _PURPOSES.values():
            if purpose in names:
                return next((self._prompts[name] for name in names if name in self._prompts), self.prompt(None))
        known = ", ".join(repr(name) for name in sorted({*_PURPOSES, *self._prompts}))
        raise InvalidRequest("input_type", f"this model has no prompt of this name, only {known}")

    def encode(self, text: str, *, prompt: str = "", max_tokens: int | None = None) -> EmbeddingInput:
        """The tokens of a prompt and a text, truncated to `max_tokens` with special tokens kept.

        Raises ContextTooLong, or InvalidRequest for invalid text.
        """
        tokens = self._tokenize(max_tokens, prompt + text)["input_ids"]
        return self._checked(EmbeddingInput(tuple(tokens), prompt_tokens=self._prompt_lengths.get(prompt, 0)))

    def encode_pair(self, query: str, document: str, *, max_tokens: int | None = None) -> EmbeddingInput:
        """The tokens of a query and a document for a reranker. Raises as `encode`."""
        encoded = self._tokenize(max_tokens, query, document)
        return self._checked(EmbeddingInput(tuple(encoded["input_ids"]), tuple(encoded.get("token_type_ids", ()))))

    def truncate(self, tokens: Sequence[int], *, max_tokens: int | None = None) -> EmbeddingInput:
        """Given tokens, truncated to `max_tokens`. Raises ContextTooLong, or InvalidRequest for numbers that are not
        tokens.
        """
        return self._checked(EmbeddingInput(tuple(tokens[:max_tokens])))

    def _tokenize(self, max_tokens: int | None, *texts: str) -> dict[str, list[int]]:
        size = sum(map(_size, texts))
        # Text with too many tokens in any tokenisation is refused unread; normalisers may shorten it, hence the factor
        # of 4.
        min_tokens = size // (4 * self._max_token_bytes)
        if max_tokens is None and min_tokens > self.max_length:
            raise ContextTooLong(min_tokens, self.max_length, exact=False)
        lower = [Lowercase().normalize_str(text) if self._lowercase else text for text in texts]
        with self._lock, RegexLimit("input"):
            encoded = self._tokenizer(*lower, truncation=max_tokens is not None, max_length=max_tokens, verbose=False)
        if max_tokens is not None and len(encoded["input_ids"]) > max_tokens:
            raise InvalidRequest(
                "truncate_prompt_tokens", f"{max_tokens} tokens are fewer than the special tokens of this model"
            )
        return {name: list(encoded[name]) for name in encoded}

    def _checked(self, encoded: EmbeddingInput) -> EmbeddingInput:
        if len(encoded.tokens) > self.max_length:
            raise ContextTooLong(len(encoded.tokens), self.max_length)
        if not all(0 <= token < self.vocabulary for token in encoded.tokens):
            raise InvalidRequest("input", f"tokens of this model are numbers from 0 to {self.vocabulary - 1}")
        return encoded

    def _prompt_length(self, prompt: str) -> int:
        """Tokens of a prompt, with special tokens before it but not after it."""
        tokens = self._tokenize(None, prompt)["input_ids"] if prompt else []
        return len(tokens) - (bool(tokens) and tokens[-1] in self._tokenizer.all_special_ids)


def _size(text: str) -> int:
    """UTF-8 bytes of a text; raises InvalidRequest for lone surrogates, which crash tokenizers."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest("input", "a text has half of a surrogate pair, which is not a character") from error
