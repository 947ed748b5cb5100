"""The chat messages of a response's items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.types.content import ContentKind
from server.http.errors import invalid_value
from server.responses.encrypted_content import decode_content
from server.schemas.chat import Message
from server.schemas.media import ChatPart, ChatTextPart, FileId, MediaPart, MediaSource
from server.schemas.response_input import (
    CallInput,
    CallOutputInput,
    CompactionInput,
    CustomCallInput,
    CustomOutputInput,
    InputFilePart,
    InputImagePart,
    InputItem,
    InputSoundPart,
    InputTextPart,
    MessageInput,
    OutputTextPart,
    ReasoningInput,
    RefusalPart,
)
from server.schemas.tools import CalledCustom, CalledFunction, CustomCall, FunctionCall, ToolCall

Part = InputTextPart | OutputTextPart | RefusalPart | InputImagePart | InputSoundPart | InputFilePart

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
    text: list[str | list[ChatPart]] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        return Message(
            role="assistant",
            content=self.text[0] if self.text else None,
            reasoning_content="\n".join(self.reasoning) or None,
            tool_calls=self.calls or None,
        )


def chat_messages(instructions: str | None, items: Iterable[InputItem], history: int = 0) -> list[Message]:
    """The conversation; ApiError for `encrypted_content` that cannot be decoded.

    history  leading items that are not of the request's input
    """
    conversation = [] if instructions is None else [Message(role="developer", content=instructions)]
    turn = _AssistantTurn()
    for index, item in enumerate(items):
        path = f"input[{index - history}]" if index >= history else "previous_response_id"
        if not _continues(turn, item):
            conversation.extend(_finished_messages(turn))
            turn = _AssistantTurn()
        match item:
            case ReasoningInput():
                turn.reasoning.extend(_reasoning(item))
            case CallInput() | CustomCallInput():
                turn.calls.append(_call(item))
            case MessageInput(role="assistant"):
                turn.text.append(_content(item.content, f"{path}.content"))
            case MessageInput():
                conversation.append(Message(role=item.role, content=_content(item.content, f"{path}.content")))
            case CompactionInput():
                conversation.append(Message(role="user", content=SUMMARY_PROMPT))
                turn.text.append(_decoded("a compaction", item.encrypted_content))
            case CallOutputInput() | CustomOutputInput():
                output = _content(item.output, f"{path}.output")
                conversation.append(Message(role="tool", tool_call_id=item.call_id, content=output))
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


def _content(content: str | Sequence[Part], path: str) -> str | list[ChatPart]:
    if isinstance(content, str):
        return content
    return [_part(part, f"{path}[{index}]") for index, part in enumerate(content)]


def _part(part: Part, path: str) -> ChatTextPart | MediaPart:
    match part:
        case RefusalPart():
            return ChatTextPart(type="text", text=part.refusal)
        case OutputTextPart():
            return ChatTextPart(type="text", text=part.text)
        case InputTextPart():
            return ChatTextPart(type="text", text=part.text, prompt_cache_breakpoint=part.prompt_cache_breakpoint)
        case InputImagePart(image_url=None):
            return _media("image", FileId(part.file_id or ""), "file_id", part, path)
        case InputImagePart():
            return _media("image", part.image_url or "", "image_url", part, path)
        case InputSoundPart():
            return _media("audio", part.input_audio.data, "input_audio.data", part, path)
        case InputFilePart():
            return _media(None, FileId(part.file_id), "file_id", part, path)


def _media(
    kind: ContentKind | None,
    source: MediaSource,
    member: str,
    part: InputImagePart | InputSoundPart | InputFilePart,
    path: str,
) -> MediaPart:
    detail = (part.detail if isinstance(part, InputImagePart) else None) or "auto"
    # A part of an earlier response has no position in the request.
    field = "previous_response_id" if path.startswith("previous") else f"{path}.{member}"
    return MediaPart(kind, source, member, detail, part.prompt_cache_breakpoint, field)
