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


class OfferedModel(TypedDict):
    """Another model for this machine, with the command that serves it; `text` describes it, or is its size."""

    name: str
    text: str
    command: str


class Demonstration(TypedDict):
    """What the bundled model is, and other models that fit the memory."""

    text: str
    models: list[OfferedModel]


class ModelCapabilities(TypedDict):
    """Capabilities of the model; `template_arguments` are names for `chat_template_kwargs`.

    default_max_tokens  of an answer whose request has no limit; null: the context
    demonstration       of the bundled model only
    input_modalities  kinds of content in messages
    batch_invariant  whether logits are bitwise identical for any batch, chunking and prefix hit; else they differ by
                     rounding, which may change the order of almost equally likely tokens
    """

    id: str
    context: int
    vocabulary: int
    chat: bool
    tools: bool
    reasoning: bool
    input_modalities: list[Literal["text", "image", "audio"]]
    template_arguments: list[str]
    adapters: list[str]
    drafters: list[str]
    batch_invariant: bool
    default_max_tokens: int | None
    demonstration: NotRequired[Demonstration]


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
