"""Converts OpenAI's messages to the messages of chat templates."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.chat_format.message import INPUT_FIELD
from engine.types.content import Upload
from server.http.errors import ApiError, invalid_value, missing_parameter
from server.http.json_limits import MAX_NODES
from server.http.parsing import loads
from server.media.uploads import PlacedPart
from server.schemas.chat import Message
from server.schemas.media import ChatPart, ChatTextPart, MediaPart, media_part
from server.schemas.tools import CalledFunction, CustomCall, ToolCall

# OpenAI's newer name of the system role, and the older name of the tool role, which chat templates do not know.
ROLES = {"developer": "system", "function": "tool"}
# Separator of content parts.
PART_SEPARATOR = "\n"
# Per body; of more, the last ones count, as in OpenAI's API. Each costs a rendering of the preceding messages.
MAX_BREAKPOINTS = 4


@dataclass(frozen=True, slots=True)
class PreparedMessages:
    """Messages for a chat template, without unset keys, and cache breakpoints.

    A content with images or sounds is a list of parts: {"type": "text", "text": ...}, {"type": "image"} and
    {"type": "audio"}, in the order of the request.

    breakpoints  (message, characters of its content before the breakpoint, an image or a sound counts as one); at most
                 MAX_BREAKPOINTS
    """

    messages: list[dict[str, object]] = field(default_factory=list)
    breakpoints: tuple[tuple[int, int], ...] = ()


def placed_parts(messages: Sequence[Message]) -> list[PlacedPart]:
    """The images and sounds of the messages, in their order."""
    return [
        _placed(media_part(part), f"messages[{index}].content[{position}]")
        for index, message in enumerate(messages)
        for position, part in enumerate(message.content if isinstance(message.content, list) else ())
        if not isinstance(part, ChatTextPart)
    ]


def prepare_messages(messages: Sequence[Message], uploads: Iterable[Upload] = ()) -> PreparedMessages:
    """The messages of a body with the uploads of its parts; ApiError if a field that the role needs is missing."""
    left = iter(uploads)
    converted: list[dict[str, object]] = []
    arguments = _ArgumentDecoder()
    called = 0
    for index, message in enumerate(messages):
        _check(message, f"messages[{index}]")
        called = index if message.function_call is not None else called
        # Function calls have no ids: a function's result belongs to the latest call.
        converted.append(_converted(message, f"call_{called}", arguments, left))
    latest = deque(_breakpoints(messages), maxlen=MAX_BREAKPOINTS)
    return PreparedMessages(converted, tuple(latest))


def has_breakpoints(messages: Sequence[Message]) -> bool:
    """Whether the client has set cache breakpoints."""
    return any(True for _ in _breakpoints(messages))


def _placed(part: MediaPart, path: str) -> PlacedPart:
    return PlacedPart(part.field or f"{path}.{part.member}", part)


def _check(message: Message, path: str) -> None:
    called = message.tool_calls or message.function_call
    if message.content is None and message.role != "assistant":
        raise invalid_value(f"{path}.content", f"a message of the role '{message.role}' needs it")
    if message.role != "assistant" and called:
        field = "tool_calls" if message.tool_calls else "function_call"
        raise invalid_value(f"{path}.{field}", "only the assistant calls tools")
    needed = {"tool": "tool_call_id", "function": "name"}.get(message.role)
    if needed and getattr(message, needed) is None:
        raise missing_parameter(f"{path}.{needed}")


def _converted(
    message: Message, legacy_id: str, arguments: _ArgumentDecoder, uploads: Iterator[Upload]
) -> dict[str, object]:
    thinking, content = _divided(message, uploads)
    converted: dict[str, object] = {"role": ROLES.get(message.role, message.role), "content": content}
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    reasoning = thinking if reasoning is None else reasoning
    result_id = legacy_id if message.role == "function" else message.tool_call_id
    optional = {"name": message.name, "tool_call_id": result_id, "reasoning_content": reasoning}
    converted.update({key: value for key, value in optional.items() if value is not None})
    calls = [_call(call.id, *_called(call, arguments)) for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls = [_call(legacy_id, message.function_call.name, arguments.read(message.function_call))]
    if calls:
        converted["tool_calls"] = calls
    return converted


def _divided(message: Message, uploads: Iterator[Upload]) -> tuple[str | None, str | list[dict[str, str]]]:
    """The reasoning among the parts of an assistant's message, and its content; a refusal if it has none."""
    if not isinstance(message.content, list):
        return None, (message.refusal or "") if message.content is None else message.content
    thinking = [part.text for part in _texts(message) if _is_reasoning(part, message)]
    reasoning = PART_SEPARATOR.join(thinking) if thinking else None
    if not _has_media(message):
        return reasoning, PART_SEPARATOR.join(part.text for part in _texts(message) if not _is_reasoning(part, message))
    return reasoning, [
        {"type": "text", "text": part.text} if isinstance(part, ChatTextPart) else {"type": next(uploads).kind}
        for part in message.content
        if not _is_reasoning(part, message)
    ]


def _texts(message: Message) -> list[ChatTextPart]:
    parts = message.content if isinstance(message.content, list) else []
    return [part for part in parts if isinstance(part, ChatTextPart)]


def _has_media(message: Message) -> bool:
    return isinstance(message.content, list) and len(_texts(message)) < len(message.content)


def _is_reasoning(part: ChatPart, message: Message) -> bool:
    return part.type == "thinking" and message.role == "assistant"


def _breakpoints(messages: Sequence[Message]) -> Iterator[tuple[int, int]]:
    for index, message in enumerate(messages):
        parts = message.content if isinstance(message.content, list) else []
        separator = "" if _has_media(message) else PART_SEPARATOR
        characters = 0
        for part in parts:
            if _is_reasoning(part, message):
                continue
            characters += len(part.text) if isinstance(part, ChatTextPart) else 1
            if part.prompt_cache_breakpoint is not None:
                yield index, characters
            characters += len(separator)


def _call(id: str, name: str, arguments: object) -> dict[str, object]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _called(call: ToolCall, arguments: _ArgumentDecoder) -> tuple[str, object]:
    """Name and arguments of a call. For templates, a custom tool is a function with one argument."""
    if isinstance(call, CustomCall):
        return call.custom.name, {INPUT_FIELD: call.custom.input}
    return call.function.name, arguments.read(call.function)


@dataclass(slots=True)
class _ArgumentDecoder:
    """Decodes arguments of tool calls: templates print them with `tojson`, which would escape JSON text twice.

    values_left  remaining JSON values of all calls of a body; the body's own limits do not count values inside strings
    """

    values_left: int = MAX_NODES

    def read(self, function: CalledFunction) -> object:
        """The decoded object; the text itself if it is invalid, too deep, or exceeds the remaining values."""
        text = function.arguments
        self.values_left -= text.count("{") + text.count("[") + text.count('"') // 2 + text.count(",") // 4
        if self.values_left < 0:
            return text
        try:
            return loads(text.encode())
        except ApiError:
            return text
