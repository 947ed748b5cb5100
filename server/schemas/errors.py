"""The error format."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict


class Error(TypedDict):
    """One error. The last three fields are set for certain codes: prompt too long, model loading."""

    message: str
    type: str
    param: str | None
    code: str
    n_prompt_tokens: NotRequired[int]
    n_ctx: NotRequired[int]
    phase: NotRequired[str]


class ErrorBody(TypedDict):
    """The body of every response with a status of 400 or more, and the last event of a failed stream."""

    error: Error
