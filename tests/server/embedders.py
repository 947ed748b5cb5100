"""What an embedding model reads and makes, for the fake engine."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

from engine.errors import ContextTooLong, InvalidRequest
from engine.types.events import Embedded, Event, Finished, Started, Timings, Usage
from engine.types.request import EmbeddingInput, EmbeddingJob


class FakeEmbeddingTokenizer:
    """What an embedding model reads: a byte is a token, between a first and a last one. Queries have a prompt."""

    max_length, vocabulary = 16, 256
    prompts: Mapping[str, str] = {"query": "Q:"}

    def prompt(self, purpose: str | None) -> str:
        if purpose in (None, "document"):
            return ""
        if purpose not in self.prompts:
            raise InvalidRequest("input_type", "there is no such prompt")
        return self.prompts[str(purpose)]

    def encode(self, text: str, *, prompt: str = "", max_tokens: int | None = None) -> EmbeddingInput:
        letters = (prompt + text).encode()[: None if max_tokens is None else max_tokens - 2]
        return self._checked(EmbeddingInput((1, *letters, 2), prompt_tokens=len(prompt)))

    def encode_pair(self, query: str, document: str, *, max_tokens: int | None = None) -> EmbeddingInput:
        letters = (1, *query.encode(), 2, *document.encode())[: None if max_tokens is None else max_tokens - 1]
        return self._checked(EmbeddingInput((*letters, 2)))

    def truncate(self, tokens: Sequence[int], *, max_tokens: int | None = None) -> EmbeddingInput:
        return self._checked(EmbeddingInput(tuple(tokens[:max_tokens])))

    def _checked(self, read: EmbeddingInput) -> EmbeddingInput:
        if len(read.tokens) > self.max_length:
            raise ContextTooLong(len(read.tokens), self.max_length)
        return read


def count_letters(job: EmbeddingJob) -> Iterator[Event]:
    """The vector of a text: how many a, b and Q it has."""
    yield Started(sum(len(each.tokens) for each in job.inputs), 0, 0)
    for each in job.inputs:
        numbers = (each.tokens.count(ord("a")), each.tokens.count(ord("b")), each.tokens.count(ord("Q")))
        yield Embedded(struct.pack("<3f", *numbers))
    usage = Usage(sum(len(each.tokens) for each in job.inputs), 0, 0)
    yield Finished("length", None, usage, Timings(0.5, 0.25, 0.0))
