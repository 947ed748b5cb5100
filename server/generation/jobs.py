"""Runs inputs on the embedding model, which returns vectors or scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import anyio.to_thread

from engine.errors import ContextTooLong, InvalidRequest
from engine.types.events import Embedded, Finished
from engine.types.request import EmbeddingInput, EmbeddingJob
from server.http.errors import context_too_long, invalid_value
from server.metrics.metrics import Endpoint
from server.service import Service


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """One little-endian float32 vector (or score) per input, in order, and the number of input tokens."""

    vectors: list[bytes]
    tokens: int


# Tokenizes one input; raises ContextTooLong or InvalidRequest.
InputReader = Callable[[], EmbeddingInput]


async def run_embedding_job(
    service: Service, readers: Sequence[tuple[str, InputReader]], id: str, endpoint: Endpoint
) -> EmbeddingResult:
    """Tokenize the inputs in a worker thread and run them; each has the field name that errors refer to."""
    inputs = await anyio.to_thread.run_sync(lambda: tuple(_read(readers)))
    vectors = []
    async with service.embed(EmbeddingJob(id, inputs), endpoint) as events:
        async for _, event in events:
            match event:
                case Embedded():
                    vectors.append(event.vector)
                case Finished():
                    return EmbeddingResult(vectors, event.usage.prompt_tokens)
    raise AssertionError("a job ends with Finished, or with an error")


def _read(readers: Sequence[tuple[str, InputReader]]) -> Iterator[EmbeddingInput]:
    for field, reader in readers:
        try:
            tokenized = reader()
        except ContextTooLong as error:
            advice = ". Please shorten or truncate it."
            raise context_too_long(error, field, subject=f"'{field}'", advice=advice) from error
        except InvalidRequest as error:
            # Errors of the input itself get the field name of the body.
            raise invalid_value(field if error.field == "input" else error.field, error.reason) from error
        if not tokenized.tokens:
            raise invalid_value(field, "it has no tokens")
        yield tokenized
