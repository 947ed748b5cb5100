"""Scores pairs of texts with the embedding model: a reranker scores each pair, else embeddings are compared."""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Callable, Sequence

import anyio.to_thread

from engine.types.status import Similarity
from server.generation.jobs import EmbeddingResult, InputReader, run_embedding_job
from server.http.errors import UNSUPPORTED_PARAMETER, ApiError
from server.metrics.metrics import Endpoint
from server.openai.embeddings import Vector, vector
from server.schemas.scoring import RerankRequest, ScoreRequest
from server.service import Service

Pairs = Sequence[tuple[str, str]]


async def compare(
    service: Service, pairs: Pairs, body: RerankRequest | ScoreRequest, id: str, endpoint: Endpoint
) -> tuple[list[float], int]:
    """A score for each (query, document) pair, and the number of tokens; raises ApiError or EngineError."""
    if body.instruction is not None:
        message = "This server does not support 'instruction' with an embedding model: it has no instructions."
        raise ApiError(UNSUPPORTED_PARAMETER, message, param="instruction")
    sides = ("query", "documents") if isinstance(body, RerankRequest) else ("text_1", "text_2")
    tokenizer = service.engine.embedding_tokenizer
    max_tokens = tokenizer.max_length if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    if service.reranker is None:
        return await _similarities(service, pairs, sides, max_tokens, id=id, endpoint=endpoint)
    readers = [(sides[1], functools.partial(tokenizer.encode_pair, *pair, max_tokens=max_tokens)) for pair in pairs]
    result = await run_embedding_job(service, readers, id, endpoint)
    return [struct.unpack("<f", score)[0] for score in result.vectors], result.tokens


async def _similarities(
    service: Service, pairs: Pairs, sides: tuple[str, str], max_tokens: int | None, *, id: str, endpoint: Endpoint
) -> tuple[list[float], int]:
    """Similarities of embeddings; a text of several pairs is embedded once per side."""
    queries, documents = (list(dict.fromkeys(side)) for side in zip(*pairs, strict=True))
    readers: list[tuple[str, InputReader]] = []
    for side, purpose, texts in zip(sides, ("query", "document"), (queries, documents), strict=True):
        tokenizer = service.engine.embedding_tokenizer
        prompt = await anyio.to_thread.run_sync(tokenizer.prompt, purpose)
        read = functools.partial(tokenizer.encode, prompt=prompt, max_tokens=max_tokens)
        readers += [(side, functools.partial(read, text)) for text in texts]
    result = await run_embedding_job(service, readers, id, endpoint)
    assert service.embedder is not None, "an embedding model is a reranker or returns embeddings"
    measure = SIMILARITIES[service.embedder.similarity]
    return await anyio.to_thread.run_sync(_measure, measure, pairs, queries, documents, result), result.tokens


def _measure(
    measure: Callable[[bytes, bytes], float],
    pairs: Pairs,
    queries: Sequence[str],
    documents: Sequence[str],
    result: EmbeddingResult,
) -> list[float]:
    """For a worker thread: many vectors have millions of numbers."""
    left = dict(zip(queries, result.vectors[: len(queries)], strict=True))
    right = dict(zip(documents, result.vectors[len(queries) :], strict=True))
    return [measure(left[query], right[document]) for query, document in pairs]


def _dot(left: Vector, right: Vector) -> float:
    return math.fsum(map(operator.mul, left, right))


def _numbers(data: bytes) -> Vector:
    return struct.unpack(f"<{len(data) // 4}f", data)


# As in sentence-transformers: larger is more similar.
SIMILARITIES: dict[Similarity, Callable[[bytes, bytes], float]] = {
    "cosine": lambda left, right: _dot(vector(left), vector(right)),
    "dot": lambda left, right: _dot(_numbers(left), _numbers(right)),
    "euclidean": lambda left, right: -math.dist(_numbers(left), _numbers(right)),
    "manhattan": lambda left, right: -math.fsum(map(abs, map(operator.sub, _numbers(left), _numbers(right)))),
}
