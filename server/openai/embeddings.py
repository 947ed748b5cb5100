"""Texts as vectors: made by the embedding model where there is one, else of the states of the very model that chats."""

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
from engine.types.status import Embedding
from server.generation.batch import run_all
from server.generation.jobs import Made, Reading, run_job
from server.generation.sampling import check_ids
from server.http.errors import invalid, unsupported
from server.metrics import Endpoint
from server.schemas.embeddings import EmbeddingBody, EmbeddingList, EmbeddingRequest, EmbeddingUsage
from server.service import Service

Vector = tuple[float, ...]
Inputs = Sequence[str | list[int]]


@dataclass(frozen=True, slots=True)
class Wish:
    """How texts are to become vectors.

    purpose  what they are for, where the embedding model makes a difference
    most     tokens of a text, which is cut there; 0: none is cut; -1: as many as the model takes
    pooling  what vectors are made of without an embedding model
    """

    purpose: str | None = None
    most: int = 0
    pooling: Pooling = "last"


async def embeddings(service: Service, body: EmbeddingRequest, id: str) -> EmbeddingList:
    """The answer to a body; raises ApiError or EngineError for what is wrong with it."""
    model = answering(service, body.model)
    for field, reason in unable(service.vectors).items():
        if getattr(body, field) is not None:
            raise unsupported(field, reason)
    check_dimensions(service, body.dimensions)
    wish = Wish(body.input_type, body.truncate_prompt_tokens or 0, body.pooling or "last")
    made = await embed(service, body.input, wish, id=id, endpoint="embeddings")
    data = await anyio.to_thread.run_sync(_data, body, made.vectors)
    usage = EmbeddingUsage(prompt_tokens=made.tokens, total_tokens=made.tokens)
    return EmbeddingList(object="list", data=data, model=model, usage=usage)


def answering(service: Service, name: str | None) -> str:
    """Who makes the vectors: the embedding model whatever the name, for clients have names of their own."""
    service.check_ready()
    if service.vectors is not None and service.settings.embedding_name is not None:
        return service.settings.embedding_name
    return service.resolve(name)


def unable(embedding: Embedding | None) -> dict[str, str]:
    """The parameters that cannot be honoured, and why; `embedding` is the model that makes vectors, if there is one."""
    if embedding is not None:
        return {"pooling": "how it pools is part of it"}
    return {"input_type": "it has no prompts"}


def check_dimensions(service: Service, dimensions: int | None) -> None:
    """ApiError for more than the embedding model has, before it computes anything."""
    if service.vectors is not None and dimensions is not None:
        _check_dimensions(service.vectors.dimensions, dimensions)


async def embed(service: Service, inputs: Inputs, wish: Wish, *, id: str, endpoint: Endpoint) -> Made:
    """Run the inputs, in order; `vector` reads what comes of each."""
    service.check_ready()
    if service.vectors is not None:
        return await run_job(service, _readings(service, inputs, wish), id, endpoint)
    prompts = await anyio.to_thread.run_sync(_read, service, inputs, wish.most)
    requests = [Request(f"{id}-{at}", prompt, pooling=wish.pooling) for at, prompt in enumerate(prompts)]
    outcomes = await run_all(service, requests, endpoint)
    tokens = sum(outcome.finished.usage.prompt_tokens for outcome in outcomes)
    return Made([outcome.vector for outcome in outcomes], tokens)


def vector(data: bytes, dimensions: int | None = None) -> Vector:
    """An input's vector of length 1; of `dimensions` numbers the first so many, normalised anew."""
    numbers = struct.unpack(f"<{len(data) // 4}f", data)
    if dimensions is not None:
        _check_dimensions(len(numbers), dimensions)
    numbers = numbers[:dimensions]
    length = math.hypot(*numbers)
    return tuple(number / length for number in numbers) if length > 0 else numbers


def _check_dimensions(size: int, wanted: int) -> None:
    if wanted > size:
        raise invalid("dimensions", f"the vectors of this model have {size}")


def _readings(service: Service, inputs: Inputs, wish: Wish) -> list[tuple[str, Reading]]:
    """The inputs for the embedding model, to be read later."""
    reader = service.engine.reader
    prompt = reader.prompt(wish.purpose)
    most = {0: None, -1: reader.longest}.get(wish.most, wish.most)

    def read(text: str | list[int]) -> EmbeddingInput:
        if isinstance(text, str):
            return reader.text(text, prompt=prompt, most=most)
        if prompt and wish.purpose is not None:
            raise InvalidRequest("input_type", "what it stands for is put before texts, and these are tokens")
        return reader.tokens(text, most=most)

    return [(_place(inputs, at), functools.partial(read, text)) for at, text in enumerate(inputs)]


def _read(service: Service, inputs: Inputs, most: int) -> list[tuple[int, ...]]:
    """The inputs as tokens of the model, cut behind `most` as in `Wish`; for a worker thread."""
    vocabulary, found = service.engine.info.vocabulary, []
    tokenizer = service.engine.tokenizer
    encode = tokenizer.encode_beginning if most else tokenizer.encode
    cut = {0: None, -1: service.engine.info.context}.get(most, most)
    for at, text in enumerate(inputs):
        tokens = (encode(text) if isinstance(text, str) else text)[:cut]
        if not tokens:
            raise invalid(_place(inputs, at), "it has no tokens")
        check_ids("input", tokens, vocabulary)
        found.append(tuple(tokens))
    return found


def _place(inputs: Inputs, at: int) -> str:
    return f"input[{at}]" if len(inputs) > 1 else "input"


def _data(body: EmbeddingRequest, vectors: Sequence[bytes]) -> list[EmbeddingBody]:
    """For a worker thread: a long list of vectors has millions of numbers."""
    return [
        EmbeddingBody(object="embedding", index=at, embedding=_written(vector(data, body.dimensions), body))
        for at, data in enumerate(vectors)
    ]


def _written(numbers: Vector, body: EmbeddingRequest) -> list[float] | str:
    packed = struct.pack(f"<{len(numbers)}f", *numbers)
    if body.encoding_format == "base64":
        return base64.b64encode(packed).decode("ascii")
    return list(struct.unpack(f"<{len(numbers)}f", packed))
