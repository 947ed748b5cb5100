"""The error envelope."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict


class Error(TypedDict):
    """One error. The last three come with the codes that need them: prompt too long, model loading."""

    message: str
    type: str
    param: str | None
    code: str
    n_prompt_tokens: NotRequired[int]
    n_ctx: NotRequired[int]
    phase: NotRequired[str]


class ErrorBody(TypedDict):
    """What every answer with a status of 400 or more holds, and the last event of a stream that broke."""

    error: Error
