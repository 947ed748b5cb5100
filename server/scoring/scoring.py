"""Relevance scores of documents for a query, by the log-odds of "yes" and "no" after a relevance question.

Works with any instruction-following model; the prompt is the one that Qwen3-Reranker is trained with
(arXiv 2506.05176). All documents of a query share its prefix, which is computed once. Requests for the
embedding model are scored there instead (similarity.py).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence

import anyio.to_thread

from engine.client import TokenizerClient
from engine.errors import EngineError
from server.generation.batch import PromptResult
from server.generation.error_fields import with_client_field_names
from server.http.errors import ApiError, invalid_value, missing_parameter, unsupported_parameter
from server.metrics.metrics import Endpoint
from server.models.registry import ModelRegistry
from server.schemas.scoring import (
    AnyRerankRequest,
    RankedDocument,
    RankedText,
    Ranking,
    RerankRequest,
    ScoreList,
    ScoreRequest,
    ScoringUsage,
)
from server.scoring.labels import LabelScorer, score_labels
from server.scoring.questions import QuestionEncoder
from server.scoring.similarity import Pairs, compare
from server.service import Service

# Qwen3-Reranker's default instruction.
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QUESTION = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".\n\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
)
_ANSWERS = ("yes", "no")
# Longer tokens are too rare to fill a document: its other characters are cut before it is tokenised.
_MAX_TOKEN_CHARACTERS = 64
# Log-odds of less stay finite.
_MIN_PROBABILITY = 1e-12


async def rerank(models: ModelRegistry, body: RerankRequest, id: str) -> Ranking:
    """The documents of a body by relevance; raises ApiError or EngineError."""
    service = _service(models, body)
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    if body.max_tokens_per_doc is not None:
        texts = await anyio.to_thread.run_sync(_truncated, service.engine.tokenizer, texts, body.max_tokens_per_doc)
    pairs = [(body.query, text) for text in texts]
    model, scores, usage = await _scores(service, body, pairs, id, "rerank")
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
    results = [RankedDocument(index=index, relevance_score=scores[index]) for index in order]
    if body.return_documents is not False:
        for ranked in results:
            ranked["document"] = {"text": texts[ranked["index"]]}
    return Ranking(id=id, model=model, results=results, usage=usage)


async def rank(models: ModelRegistry, body: AnyRerankRequest, id: str) -> Ranking | list[RankedText]:
    """A ranking of `documents`, or of TEI's `texts`; raises ApiError or EngineError."""
    if body.texts is None and not body.documents:
        raise missing_parameter("documents")
    if body.texts is None:
        return await rerank(models, body, id)
    if body.documents:
        raise invalid_value("texts", "it is TEI's name of 'documents'; give one of them")
    return await _rank_texts(models, body, body.texts, id)


async def _rank_texts(models: ModelRegistry, body: AnyRerankRequest, texts: list[str], id: str) -> list[RankedText]:
    service = models.use_for_scores(body.model)
    by_embedding = service.name == service.settings.embedding_name
    if body.raw_scores and by_embedding:
        raise unsupported_parameter("raw_scores", "its scores have the activation of its configuration")
    truncation = -1 if body.truncate and by_embedding else body.truncate_prompt_tokens
    changes = {"documents": texts, "return_documents": False, "truncate_prompt_tokens": truncation}
    try:
        ranking = await rerank(models, body.model_copy(update=changes), id)
    except (ApiError, EngineError) as error:
        raise with_client_field_names(error, "/rerank", {r"documents(.*)": r"texts\1"}) from error
    ranked = [
        RankedText(
            index=result["index"],
            score=_log_odds(result["relevance_score"]) if body.raw_scores else result["relevance_score"],
        )
        for result in ranking["results"]
    ]
    if body.return_text:
        for result in ranked:
            result["text"] = texts[result["index"]]
    return ranked


async def score(models: ModelRegistry, body: ScoreRequest, id: str) -> ScoreList:
    """The scores of a body's pairs; raises ApiError or EngineError."""
    service = _service(models, body)
    model, scores, usage = await _scores(service, body, _pairs(body), id, "score")
    return ScoreList(
        id=id,
        object="list",
        created=int(time.time()),
        model=model,
        data=[{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)],
        usage=usage,
    )


def _service(models: ModelRegistry, body: RerankRequest | ScoreRequest) -> Service:
    models.check_ready()
    service = models.use_for_scores(body.model)
    service.check_ready()
    return service


def _truncated(tokenizer: TokenizerClient, texts: Sequence[str], max_tokens: int) -> list[str]:
    """The texts up to `max_tokens` each; for a worker thread."""
    return [
        tokenizer.decode(tokens[:max_tokens]) if len(tokens) > max_tokens else text
        for text in texts
        for tokens in [tokenizer.encode(text[: _MAX_TOKEN_CHARACTERS * max_tokens], add_special=False)]
    ]


def _log_odds(probability: float) -> float:
    return math.log(max(probability, _MIN_PROBABILITY) / max(1 - probability, _MIN_PROBABILITY))


def _pairs(body: ScoreRequest) -> list[tuple[str, str]]:
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(first) not in (1, len(second)):
        raise invalid_value("text_1", f"{len(first)} texts cannot be paired with {len(second)}")
    return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


async def _scores(
    service: Service, body: RerankRequest | ScoreRequest, pairs: Pairs, id: str, endpoint: Endpoint
) -> tuple[str, list[float], ScoringUsage]:
    """Model name, scores of the pairs, and usage."""
    if service.name != service.settings.embedding_name:
        if body.truncate_prompt_tokens is not None:
            raise unsupported_parameter("truncate_prompt_tokens", "it is not an embedding model")
        return service.name, *await _relevance(service, pairs, body, id, endpoint)
    scores, tokens = await compare(service, pairs, body, id, endpoint)
    return service.name, scores, ScoringUsage(prompt_tokens=tokens, total_tokens=tokens)


async def _relevance(
    service: Service, pairs: Pairs, body: RerankRequest | ScoreRequest, id: str, endpoint: Endpoint
) -> tuple[list[float], ScoringUsage]:
    """The probability of "yes" against "no" for each (query, document) pair, and usage."""
    field = "documents" if isinstance(body, RerankRequest) else "text_2"
    instruction = body.instruction or INSTRUCTION
    build = functools.partial(_scorers, service, pairs, instruction, field)
    scores, results = await score_labels(service, build, id, endpoint)
    return [score.probabilities[0] for score in scores], _usage(results)


def _scorers(service: Service, pairs: Pairs, instruction: str, field: str) -> list[LabelScorer]:
    encoder = QuestionEncoder(service.engine.tokenizer, service.engine.info.context, field)
    return [
        encoder.label_scorer(_QUESTION.format(instruction=instruction, query=query, document=document), _ANSWERS)
        for query, document in pairs
    ]


def _usage(results: Sequence[PromptResult]) -> ScoringUsage:
    tokens = sum(result.finished.usage.prompt_tokens for result in results)
    completion = sum(result.finished.usage.completion_tokens for result in results)
    return ScoringUsage(prompt_tokens=tokens, total_tokens=tokens + completion)
