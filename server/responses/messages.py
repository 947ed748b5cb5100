"""The chat messages of a response's items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.http.errors import invalid_value
from server.responses.encrypted_content import decode_content
from server.schemas.chat import Message
from server.schemas.content import TextPart
from server.schemas.response_input import (
    CallInput,
    CallOutputInput,
    CompactionInput,
    CustomCallInput,
    CustomOutputInput,
    InputItem,
    InputTextPart,
    MessageInput,
    OutputTextPart,
    ReasoningInput,
    RefusalPart,
)
from server.schemas.tools import CalledCustom, CalledFunction, CustomCall, FunctionCall, ToolCall

Part = InputTextPart | OutputTextPart | RefusalPart

# The last message of a conversation to be compacted, and the message in front of a compaction's text.
SUMMARY_PROMPT = (
    "Summarise our conversation so far, so that it can go on from your summary alone. Keep names, numbers, "
    "decisions, open questions, tasks that are not done, and the results of tools. Write nothing but the summary."
)


@dataclass(frozen=True, slots=True)
class LatestResponse:
    """The latest response of a WebSocket connection, with all its input and output items."""

    id: str = ""
    items: tuple[dict[str, Any], ...] = ()


@dataclass(slots=True)
class _AssistantTurn:
    """Consecutive items of the assistant: one chat message holds reasoning, text and tool calls."""

    reasoning: list[str] = field(default_factory=list)
    text: list[str | list[TextPart]] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        return Message(
            role="assistant",
            content=self.text[0] if self.text else None,
            reasoning_content="\n".join(self.reasoning) or None,
            tool_calls=self.calls or None,
        )


def chat_messages(instructions: str | None, items: Iterable[InputItem]) -> list[Message]:
    """The conversation; ApiError for `encrypted_content` that cannot be decoded."""
    conversation = [] if instructions is None else [Message(role="developer", content=instructions)]
    turn = _AssistantTurn()
    for item in items:
        if not _continues(turn, item):
            conversation.extend(_finished_messages(turn))
            turn = _AssistantTurn()
        match item:
            case ReasoningInput():
                turn.reasoning.extend(_reasoning(item))
            case CallInput() | CustomCallInput():
                turn.calls.append(_call(item))
            case MessageInput(role="assistant"):
                turn.text.append(_content(item.content))
            case MessageInput():
                conversation.append(Message(role=item.role, content=_content(item.content)))
            case CompactionInput():
                conversation.append(Message(role="user", content=SUMMARY_PROMPT))
                turn.text.append(_decoded("a compaction", item.encrypted_content))
            case CallOutputInput() | CustomOutputInput():
                conversation.append(Message(role="tool", tool_call_id=item.call_id, content=_content(item.output)))
    conversation.extend(_finished_messages(turn))
    return conversation


def _continues(turn: _AssistantTurn, item: InputItem) -> bool:
    """Whether the item belongs to the same assistant message: reasoning, then text, then tool calls."""
    match item:
        case ReasoningInput():
            return not turn.text and not turn.calls
        case MessageInput(role="assistant"):
            return not turn.text and not turn.calls
        case CallInput() | CustomCallInput():
            return True
    return False


def _finished_messages(turn: _AssistantTurn) -> list[Message]:
    return [turn.message()] if turn.reasoning or turn.text or turn.calls else []


def _reasoning(item: ReasoningInput) -> list[str]:
    if item.content:
        return [part.text for part in item.content]
    if item.encrypted_content is None:
        return []
    return [_decoded("a reasoning", item.encrypted_content)]


def _decoded(subject: str, sealed: str) -> str:
    try:
        return decode_content(sealed)
    except ValueError as error:
        raise invalid_value("input", f"'encrypted_content' of {subject} cannot be read, {error}") from error


def _call(item: CallInput | CustomCallInput) -> ToolCall:
    if isinstance(item, CustomCallInput):
        return CustomCall(id=item.call_id, type="custom", custom=CalledCustom(name=item.name, input=item.input))
    return FunctionCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))


def _content(content: str | Sequence[Part]) -> str | list[TextPart]:
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: Part) -> TextPart:
    if isinstance(part, RefusalPart):
        return TextPart(type="text", text=part.refusal)
    breakpoint = part.prompt_cache_breakpoint if isinstance(part, InputTextPart) else None
    return TextPart(type="text", text=part.text, prompt_cache_breakpoint=breakpoint)
