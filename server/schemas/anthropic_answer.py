"""Responses of Anthropic's /v1/messages."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnsweredText(TypedDict):
    """A text block."""

    type: Literal["text"]
    text: str
    citations: None


class AnsweredThinking(TypedDict):
    """A reasoning block."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweredTool(TypedDict):
    """A tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


AnsweredBlock = AnsweredText | AnsweredThinking | AnsweredTool


class AnthropicUsage(TypedDict):
    """Token usage: each prompt token is counted in exactly one of the first three fields."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnsweredMessage(TypedDict):
    """A message response."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class MessageStop(TypedDict):
    """Stop reason."""

    stop_reason: StopReason
    stop_sequence: str | None


class BlockDelta(TypedDict):
    """A delta of a block."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    partial_json: NotRequired[str]


class AnthropicEvent(TypedDict):
    """One event of a stream; its type determines the fields."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    index: NotRequired[int]
    message: NotRequired[AnsweredMessage]
    content_block: NotRequired[AnsweredBlock]
    delta: NotRequired[BlockDelta | MessageStop]
    usage: NotRequired[AnthropicUsage]


class AnthropicError(TypedDict):
    """Error type and message."""

    type: str
    message: str


class AnthropicErrorBody(TypedDict):
    """The body of every response with a status of 400 or more."""

    type: Literal["error"]
    error: AnthropicError


class TokenCount(TypedDict):
    """Number of prompt tokens."""

    input_tokens: int
