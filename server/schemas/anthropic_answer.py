"""Anthropic's own API, /v1/messages: what its clients read."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnsweredText(TypedDict):
    """What is said to the user."""

    type: Literal["text"]
    text: str
    citations: None


class AnsweredThinking(TypedDict):
    """What the model said before its answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweredTool(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


AnsweredBlock = AnsweredText | AnsweredThinking | AnsweredTool


class AnthropicUsage(TypedDict):
    """What an answer cost, in tokens: those of the prompt are in one of the first three, and in no other."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnsweredMessage(TypedDict):
    """An answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class Stopping(TypedDict):
    """Why an answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class BlockDelta(TypedDict):
    """More of a block."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    partial_json: NotRequired[str]


class AnthropicEvent(TypedDict):
    """One event of a stream: which fields it has its type says."""

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
    delta: NotRequired[BlockDelta | Stopping]
    usage: NotRequired[AnthropicUsage]


class AnthropicError(TypedDict):
    """What went wrong, in one word of a few and a sentence."""

    type: str
    message: str


class AnthropicErrorBody(TypedDict):
    """What every answer with a status of 400 or more holds here."""

    type: Literal["error"]
    error: AnthropicError


class TokenCount(TypedDict):
    """The tokens of a prompt."""

    input_tokens: int
