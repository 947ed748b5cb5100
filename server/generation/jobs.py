"""Jobs for the embedding model: its inputs are read in a worker thread, and come back as vectors or as scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import anyio.to_thread

from engine.errors import ContextTooLong, InvalidRequest
from engine.types.events import Embedded, Finished
from engine.types.request import EmbeddingInput, EmbeddingJob
from server.http.errors import context_too_long, invalid_value
from server.metrics import Endpoint
from server.service import Service


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """What became of the inputs, in order, little-endian float32; and how many tokens they had."""

    vectors: list[bytes]
    tokens: int


# Reads one input; raises as the engine's Reader.
InputReader = Callable[[], EmbeddingInput]


async def run_embedding_job(
    service: Service, readings: Sequence[tuple[str, InputReader]], id: str, endpoint: Endpoint
) -> EmbeddingResult:
    """Read the inputs, each with the place in the body that an error shall name, and run them."""
    inputs = await anyio.to_thread.run_sync(lambda: tuple(_read(readings)))
    vectors = []
    async with service.embed(EmbeddingJob(id, inputs), endpoint) as events:
        async for _, event in events:
            match event:
                case Embedded():
                    vectors.append(event.vector)
                case Finished():
                    return EmbeddingResult(vectors, event.usage.prompt_tokens)
    raise AssertionError("a job ends with Finished, or with an error")


def _read(readings: Sequence[tuple[str, InputReader]]) -> Iterator[EmbeddingInput]:
    for place, reading in readings:
        try:
            read = reading()
        except ContextTooLong as error:
            advice = ". Please shorten it, or have it cut."
            raise context_too_long(error, place, subject=f"'{place}'", advice=advice) from error
        except InvalidRequest as error:
            # Half of what can be wrong is about the input itself, whose name is the body's affair.
            raise invalid_value(place if error.field == "input" else error.field, error.reason) from error
        if not read.tokens:
            raise invalid_value(place, "it has no tokens")
        yield read
