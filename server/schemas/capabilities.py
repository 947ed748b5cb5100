"""The answer of /v1/capabilities."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class Parameter(TypedDict):
    """What becomes of a parameter.

    honoured  it does what its documentation says
    noted     it is accepted, and no answer depends on it
    refused   it is answered 400 unsupported_parameter, but for null and the values in `accepted`, which ask for nothing
    """

    support: Literal["honoured", "noted", "refused"]
    reason: NotRequired[str]
    accepted: NotRequired[list[object]]


class Endpoint(TypedDict):
    """The parameters of a body, by their names."""

    parameters: dict[str, Parameter]


class ModelCapabilities(TypedDict):
    """What the model itself can do; `template_arguments` are names for `chat_template_kwargs`.

    batch_invariant  whether the logits of a text are the same bit for bit beside any other requests, in any chunks and
                     behind any prefix hit; else they are so but for rounding, which may decide between two tokens that
                     are all but equally likely
    """

    id: str
    context: int
    vocabulary: int
    chat: bool
    tools: bool
    reasoning: bool
    template_arguments: list[str]
    drafters: list[str]
    batch_invariant: bool


class EmbeddingCapabilities(TypedDict):
    """What the embedding model can do; `prompts` are names for `input_type`."""

    id: str
    makes: Literal["vectors", "scores"]
    context: int
    vocabulary: int
    dimensions: int
    similarity: str
    prompts: list[str]


class Capabilities(TypedDict):
    """By endpoint and by model. With `lenient`, what is refused is left out and told in `warnings` instead."""

    object: Literal["capabilities"]
    lenient: bool
    model: ModelCapabilities
    embedding_model: NotRequired[EmbeddingCapabilities]
    endpoints: dict[str, Endpoint]
