"""Embeddings, from the embedding model if there is one, else from hidden states of the language model."""

from __future__ import annotations

import base64
import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import anyio.to_thread

from engine.errors import InvalidRequest
from engine.types.request import EmbeddingInput, Pooling, Request
from engine.types.status import EmbeddingModelInfo
from server.generation.batch import run_all
from server.generation.jobs import EmbeddingResult, InputReader, run_embedding_job
from server.generation.sampling import check_token_ids
from server.http.errors import invalid_value, unsupported_parameter
from server.metrics.metrics import Endpoint
from server.models.registry import ModelRegistry
from server.schemas.embeddings import EmbeddingBody, EmbeddingList, EmbeddingRequest, EmbeddingUsage
from server.service import Service

Vector = tuple[float, ...]
Inputs = Sequence[str | list[int]]


@dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    """Options of an embedding request.

    purpose     input type, for embedding models with prompts
    max_tokens  length to which each input is truncated; 0: not truncated; -1: the model's maximum
    pooling     pooling of the language model's hidden states
    """

    purpose: str | None = None
    max_tokens: int = 0
    pooling: Pooling = "last"


async def embeddings(models: ModelRegistry, body: EmbeddingRequest, id: str) -> EmbeddingList:
    """The response to a body; raises ApiError or EngineError."""
    service = models.use_for_embeddings(body.model)
    for field, reason in unsupported_embedding_parameters(service.embedder).items():
        if getattr(body, field) is not None:
            raise unsupported_parameter(field, reason)
    check_dimensions(service, body.dimensions)
    options = EmbeddingOptions(body.input_type, body.truncate_prompt_tokens or 0, body.pooling or "last")
    result = await embed(service, body.input, options, id=id, endpoint="embeddings")
    data = await anyio.to_thread.run_sync(_data, body, result.vectors)
    usage = EmbeddingUsage(prompt_tokens=result.tokens, total_tokens=result.tokens)
    return EmbeddingList(object="list", data=data, model=service.name, usage=usage)


def unsupported_embedding_parameters(embedding: EmbeddingModelInfo | None) -> dict[str, str]:
    """Parameters that cannot be honoured, with the reason; `embedding`: the embedding model, if there is one."""
    if embedding is not None:
        return {"pooling": "its pooling is fixed"}
    return {"input_type": "it has no prompts"}


def check_dimensions(service: Service, dimensions: int | None) -> None:
    """ApiError before anything runs if the embedding model has fewer dimensions."""
    if service.embedder is not None and dimensions is not None:
        _check_dimensions(service.embedder.dimensions, dimensions)


async def embed(
    service: Service, inputs: Inputs, options: EmbeddingOptions, *, id: str, endpoint: Endpoint
) -> EmbeddingResult:
    """Run the inputs; results in order, see `vector`."""
    service.check_ready()
    if service.embedder is not None:
        readers = await anyio.to_thread.run_sync(_readers, service, inputs, options)
        return await run_embedding_job(service, readers, id, endpoint)
    prompts = await anyio.to_thread.run_sync(_read, service, inputs, options.max_tokens)
    requests = [Request(f"{id}-{index}", prompt, pooling=options.pooling) for index, prompt in enumerate(prompts)]
    results = await run_all(service, requests, endpoint)
    tokens = sum(result.finished.usage.prompt_tokens for result in results)
    return EmbeddingResult([result.vector for result in results], tokens)


def vector(data: bytes, dimensions: int | None = None) -> Vector:
    """An embedding of length 1; with `dimensions`, truncated and normalised again."""
    numbers = struct.unpack(f"<{len(data) // 4}f", data)
    if dimensions is not None:
        _check_dimensions(len(numbers), dimensions)
    numbers = numbers[:dimensions]
    length = math.hypot(*numbers)
    return tuple(number / length for number in numbers) if length > 0 else numbers


def _check_dimensions(size: int, requested: int) -> None:
    if requested > size:
        raise invalid_value("dimensions", f"the embeddings of this model have {size}")


def _readers(service: Service, inputs: Inputs, options: EmbeddingOptions) -> list[tuple[str, InputReader]]:
    """Tokenization of the inputs for the embedding model, for a worker thread."""
    tokenizer = service.engine.embedding_tokenizer
    prompt = tokenizer.prompt(options.purpose)
    max_tokens = {0: None, -1: tokenizer.max_length}.get(options.max_tokens, options.max_tokens)

    def read(text: str | list[int]) -> EmbeddingInput:
        if isinstance(text, str):
            return tokenizer.encode(text, prompt=prompt, max_tokens=max_tokens)
        if prompt and options.purpose is not None:
            raise InvalidRequest("input_type", "its prompt can be prepended to text only, not to tokens")
        return tokenizer.truncate(text, max_tokens=max_tokens)

    return [(_field(inputs, index), functools.partial(read, text)) for index, text in enumerate(inputs)]


def _read(service: Service, inputs: Inputs, max_tokens: int) -> list[tuple[int, ...]]:
    """Tokens of the inputs, truncated to `max_tokens` as in EmbeddingOptions; for a worker thread."""
    vocabulary, prompts = service.engine.info.vocabulary, []
    tokenizer = service.engine.tokenizer
    encode = tokenizer.encode_truncated if max_tokens else tokenizer.encode
    limit = {0: None, -1: service.engine.info.context}.get(max_tokens, max_tokens)
    for index, text in enumerate(inputs):
        tokens = (encode(text) if isinstance(text, str) else text)[:limit]
        if not tokens:
            raise invalid_value(_field(inputs, index), "it has no tokens")
        check_token_ids("input", tokens, vocabulary)
        prompts.append(tuple(tokens))
    return prompts


def _field(inputs: Inputs, index: int) -> str:
    return f"input[{index}]" if len(inputs) > 1 else "input"


def _data(body: EmbeddingRequest, vectors: Sequence[bytes]) -> list[EmbeddingBody]:
    """For a worker thread: many vectors have millions of numbers."""
    return [
        EmbeddingBody(object="embedding", index=index, embedding=_written(vector(data, body.dimensions), body))
        for index, data in enumerate(vectors)
    ]


def _written(numbers: Vector, body: EmbeddingRequest) -> list[float] | str:
    packed = struct.pack(f"<{len(numbers)}f", *numbers)
    if body.encoding_format == "base64":
        return base64.b64encode(packed).decode("ascii")
    return list(struct.unpack(f"<{len(numbers)}f", packed))
