"""POST /v1/embeddings: the request and the response."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PlainValidator
from typing_extensions import TypedDict

from engine.types.request import Pooling
from server.schemas import policy
from server.schemas.common import Cut, Label
from server.schemas.completions import read_prompts
from server.schemas.content import Strict

# OpenAI's limit.
MAX_INPUTS = 2048

Inputs = Annotated[
    list[str | list[int]],
    PlainValidator(
        functools.partial(read_prompts, max_prompts=MAX_INPUTS),
        json_schema_input_type=str | list[str] | list[int] | list[list[int]],
    ),
]


class EmbeddingRequest(Strict):
    """Texts or token ids to embed.

    input_type  purpose of the texts, as in Cohere's, Voyage's and NVIDIA's APIs; or the name of a prompt of the model
    truncate_prompt_tokens  truncates longer texts, as in vLLM; -1: to the model's maximum
    pooling     pooling of the model's hidden states; an extension of this server
    """

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.EMBEDDINGS

    model: str | None = None
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**20)] | None = None
    pooling: Pooling | None = None
    input_type: Label | None = None
    truncate_prompt_tokens: Cut | None = None
    user: Label | None = None


class EmbeddingUsage(TypedDict):
    """Token usage."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingBody(TypedDict):
    """The embedding of one input, of length 1: numbers, or little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(TypedDict):
    """The embeddings, in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingBody]
    model: str
    usage: EmbeddingUsage
