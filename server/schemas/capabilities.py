"""The response of /v1/capabilities."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class Parameter(TypedDict):
    """Support of a parameter.

    honoured  it has its documented effect
    noted     it is accepted, and no response depends on it
    refused   it is answered 400 unsupported_parameter, except null and the neutral values in `accepted`
    """

    support: Literal["honoured", "noted", "refused"]
    reason: NotRequired[str]
    accepted: NotRequired[list[object]]


class Endpoint(TypedDict):
    """Parameters of a body by name."""

    parameters: dict[str, Parameter]


class ModelCapabilities(TypedDict):
    """Capabilities of the model; `template_arguments` are names for `chat_template_kwargs`.

    input_modalities  kinds of content in messages: text
    batch_invariant  whether logits are bitwise identical for any batch, chunking and prefix hit; else they differ by
                     rounding, which may change the order of almost equally likely tokens
    """

    id: str
    context: int
    vocabulary: int
    chat: bool
    tools: bool
    reasoning: bool
    input_modalities: list[Literal["text", "image"]]
    template_arguments: list[str]
    drafters: list[str]
    batch_invariant: bool


class EmbeddingCapabilities(TypedDict):
    """Capabilities of the embedding model; `prompts` are names for `input_type`."""

    id: str
    makes: Literal["vectors", "scores"]
    context: int
    vocabulary: int
    dimensions: int
    similarity: str
    prompts: list[str]


class Capabilities(TypedDict):
    """Capabilities by endpoint and by model. With `lenient`, refused parameters are ignored with `warnings`."""

    object: Literal["capabilities"]
    lenient: bool
    model: ModelCapabilities
    embedding_model: NotRequired[EmbeddingCapabilities]
    endpoints: dict[str, Endpoint]
