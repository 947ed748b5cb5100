"""Texts as vectors: made of the states of the very model that chats, normalised to length 1."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence

import anyio.to_thread

from engine.types import Pooling, Request
from server.batch import Outcome, run_all
from server.errors import INVALID_VALUE, ApiError
from server.metrics import Endpoint
from server.sampling import check_ids
from server.schemas.embeddings import EmbeddingBody, EmbeddingList, EmbeddingRequest
from server.service import Service

Vector = tuple[float, ...]


async def embeddings(service: Service, body: EmbeddingRequest, id: str) -> EmbeddingList:
    """The answer to a body; raises ApiError or EngineError for what is wrong with it."""
    model = service.resolve(body.model)
    outcomes = await embed(service, body.input, pooling=body.pooling or "last", id=id, endpoint="embeddings")
    data = await anyio.to_thread.run_sync(_data, body, outcomes)
    tokens = sum(outcome.finished.usage.prompt_tokens for outcome in outcomes)
    return EmbeddingList(object="list", data=data, model=model, usage={"prompt_tokens": tokens, "total_tokens": tokens})


async def embed(
    service: Service, inputs: Sequence[str | list[int]], *, pooling: Pooling, id: str, endpoint: Endpoint
) -> list[Outcome]:
    """Run the inputs, in order; `vector` reads what comes of each."""
    service.check_ready()
    prompts = await anyio.to_thread.run_sync(_read, service, inputs)
    requests = [Request(f"{id}-{at}", prompt, pooling=pooling) for at, prompt in enumerate(prompts)]
    return await run_all(service, requests, endpoint)


def vector(outcome: Outcome, dimensions: int | None = None) -> Vector:
    """An input's vector of length 1; of `dimensions` numbers the first so many, normalised anew."""
    size = len(outcome.vector) // 4
    if dimensions is not None and dimensions > size:
        message = f"Invalid value for 'dimensions': the vectors of this model have {size}."
        raise ApiError(INVALID_VALUE, message, param="dimensions")
    numbers = struct.unpack(f"<{size}f", outcome.vector)[:dimensions]
    length = math.hypot(*numbers)
    return tuple(number / length for number in numbers) if length > 0 else numbers


def _read(service: Service, inputs: Sequence[str | list[int]]) -> list[tuple[int, ...]]:
    """The inputs as tokens; for a worker thread."""
    vocabulary, found = service.engine.info.vocabulary, []
    for at, text in enumerate(inputs):
        tokens = service.engine.tokenizer.encode(text) if isinstance(text, str) else text
        if not tokens:
            place = f"input[{at}]" if len(inputs) > 1 else "input"
            raise ApiError(INVALID_VALUE, f"Invalid value for '{place}': it has no tokens.", param=place)
        check_ids("input", tokens, vocabulary)
        found.append(tuple(tokens))
    return found


def _data(body: EmbeddingRequest, outcomes: Sequence[Outcome]) -> list[EmbeddingBody]:
    """For a worker thread: a long list of vectors has millions of numbers."""
    return [
        EmbeddingBody(object="embedding", index=at, embedding=_written(vector(outcome, body.dimensions), body))
        for at, outcome in enumerate(outcomes)
    ]


def _written(numbers: Vector, body: EmbeddingRequest) -> list[float] | str:
    packed = struct.pack(f"<{len(numbers)}f", *numbers)
    if body.encoding_format == "base64":
        return base64.b64encode(packed).decode("ascii")
    return list(struct.unpack(f"<{len(numbers)}f", packed))
