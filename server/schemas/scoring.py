"""POST /v1/rerank and /v1/score: relevance scores, in the formats of Jina, Cohere and vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NotRequired

from pydantic import AliasChoices, Discriminator, Field, Tag
from typing_extensions import TypedDict

from server.schemas import policy
from server.schemas.common import Cut, Label
from server.schemas.content import Strict

# Jina's limit.
MAX_DOCUMENTS = 2048

Instruction = Annotated[str, Field(min_length=1, max_length=4096)]


class Document(Strict):
    """A text in an object, as in Jina's API."""

    text: str


def _kind(document: object) -> str:
    return "text" if isinstance(document, str) else "document"


AnyDocument = Annotated[Annotated[str, Tag("text")] | Annotated[Document, Tag("document")], Discriminator(_kind)]


class RerankRequest(Strict):
    """A query, and documents to sort by relevance.

    instruction  task description for language models
    truncate_prompt_tokens  truncates a text or pair for the embedding model, as in vLLM
    max_tokens_per_doc      truncates each document, as in Cohere's API, in tokens of the language model
    """

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.RERANK

    model: str | None = None
    query: str
    documents: Annotated[list[AnyDocument], Field(min_length=1, max_length=MAX_DOCUMENTS)]
    top_n: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    return_documents: bool | None = None
    instruction: Instruction | None = None
    truncate_prompt_tokens: Cut | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    user: Label | None = None


class AnyRerankRequest(RerankRequest):
    """A ranking, or one in the format of TEI (text-embeddings-inference): with `texts` in place of `documents`.

    raw_scores  log-odds in place of probabilities
    """

    documents: Annotated[list[AnyDocument], Field(min_length=1, max_length=MAX_DOCUMENTS)] = []
    texts: Annotated[list[str], Field(min_length=1, max_length=MAX_DOCUMENTS)] | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["right", "Right"] | None = None


def _many(texts: object) -> str:
    return "texts" if isinstance(texts, list) else "text"


Texts = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[str], Field(min_length=1, max_length=MAX_DOCUMENTS), Tag("texts")],
    Discriminator(_many),
]


class ScoreRequest(Strict):
    """One text with many, or pairs of texts; vLLM's names `queries` and `documents` are accepted."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.RERANK

    model: str | None = None
    text_1: Annotated[Texts, Field(validation_alias=AliasChoices("text_1", "queries"))]
    text_2: Annotated[Texts, Field(validation_alias=AliasChoices("text_2", "documents"))]
    instruction: Instruction | None = None
    truncate_prompt_tokens: Cut | None = None
    user: Label | None = None


class ScoringUsage(TypedDict):
    """Token usage; the query counts for every document, though it is computed once."""

    prompt_tokens: int
    total_tokens: int


class RankedDocument(TypedDict):
    """A document's index in the request, and its relevance."""

    index: int
    relevance_score: float
    document: NotRequired[dict[str, str]]


class RankedText(TypedDict):
    """A text's index in the request and its score, in TEI's format."""

    index: int
    score: float
    text: NotRequired[str]


class Ranking(TypedDict):
    """The documents by relevance."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: ScoringUsage


class Score(TypedDict):
    """Score of a pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(TypedDict):
    """The scores, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: ScoringUsage
