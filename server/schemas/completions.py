"""POST /v1/completions: the request, the response and the chunks of a stream."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from server.schemas import policy
from server.schemas.common import (
    MAX_CHOICES,
    AnsweredTier,
    FinishReason,
    Generation,
    PromptLogprobs,
    PromptProgress,
    TimingsBody,
    UsageBody,
    unlimited,
)
from server.schemas.content import MAX_TOKENS

MAX_PROMPTS = 64
MAX_TOKEN_ID = 2**31 - 1


def read_prompts(value: Any, *, max_prompts: int) -> list[str | list[int]]:
    """One or several prompts as a list of at most `max_prompts` prompts; a flat list of integers is one prompt."""
    match value:
        case str():
            return [value]
        case [] | [[], *_]:
            raise PydanticCustomError("invalid_value", "it must not be empty")
        case [int(), *_] if len(value) > MAX_TOKENS:
            raise PydanticCustomError("invalid_value", f"it may hold {MAX_TOKENS} tokens at most")
        case [int(), *_] if _ids(value):
            return [value]
        case list() if len(value) > max_prompts:
            raise PydanticCustomError("invalid_value", f"it may hold {max_prompts} prompts at most")
        case [str(), *_] if all(isinstance(prompt, str) for prompt in value):
            return list(value)
        case [list(), *_] if all(isinstance(prompt, list) and prompt and _ids(prompt) for prompt in value):
            return list(value)
    raise PydanticCustomError(
        "invalid_value", "it must be a string, a list of strings, a list of token ids, or a list of such lists"
    )


def _ids(value: list[Any]) -> bool:
    # Loops in C: a prompt may have half a million tokens.
    return {*map(type, value)} == {int} and min(value) >= 0 and max(value) <= MAX_TOKEN_ID


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(
        functools.partial(read_prompts, max_prompts=MAX_PROMPTS),
        json_schema_input_type=str | list[str] | list[int] | list[list[int]],
    ),
]


class CompletionRequest(Generation):
    """A completion request. Every prompt has its choices, in order.

    suffix  text after the answer, for models with tokens for fill-in-the-middle
    """

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = {**policy.EXTENSIONS, **policy.COMPLETIONS}
    hints: ClassVar[Mapping[str, str]] = policy.COMPLETION_HINTS

    prompt: Prompts
    max_tokens: Annotated[Annotated[int, Field(ge=0, le=2**31 - 1)] | None, BeforeValidator(unlimited)] = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class TextLogprobs(TypedDict):
    """One entry per token in every list; `text_offset` counts characters from the start of the choice's text.

    With `echo`, the prompt's tokens come first; the first token's log-probability is null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(TypedDict):
    """One choice, or its part of a chunk."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class Completion(TypedDict):
    """A completion response or a chunk; in chunks, `usage` is present if requested: null except in the last one.

    `seed` is in the first chunk of a stream that can be resumed.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    service_tier: NotRequired[AnsweredTier]
    usage: NotRequired[UsageBody | None]
    timings: NotRequired[TimingsBody]
    metadata: NotRequired[dict[str, str]]
    prompt_progress: NotRequired[PromptProgress]
    warnings: NotRequired[list[str]]
    seed: NotRequired[int]
