"""Converts OpenAI's messages to the messages of chat templates."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.chat_format.message import INPUT_FIELD
from server.http.errors import ApiError, invalid_value, missing_parameter
from server.http.json_limits import MAX_NODES
from server.http.parsing import loads
from server.schemas.chat import Message
from server.schemas.content import text_of
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

    breakpoints  (message, characters of its content before the breakpoint); at most MAX_BREAKPOINTS
    """

    messages: list[dict[str, object]] = field(default_factory=list)
    breakpoints: tuple[tuple[int, int], ...] = ()


def prepare_messages(messages: Sequence[Message]) -> PreparedMessages:
    """The messages of a body; ApiError if a field that the role needs is missing."""
    converted: list[dict[str, object]] = []
    arguments = _ArgumentDecoder()
    called = 0
    for index, message in enumerate(messages):
        _check(message, f"messages[{index}]")
        called = index if message.function_call is not None else called
        # Function calls have no ids: a function's result belongs to the latest call.
        converted.append(_converted(message, f"call_{called}", arguments))
    latest = deque(_breakpoints(messages), maxlen=MAX_BREAKPOINTS)
    return PreparedMessages(converted, tuple(latest))


def has_breakpoints(messages: Sequence[Message]) -> bool:
    """Whether the client has set cache breakpoints."""
    return any(True for _ in _breakpoints(messages))


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


def _converted(message: Message, legacy_id: str, arguments: _ArgumentDecoder) -> dict[str, object]:
    thinking, content = _divided(message)
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


def _divided(message: Message) -> tuple[str | None, str]:
    """The reasoning among the parts of an assistant's message, and its text; a refusal if it has no content."""
    if message.content is None:
        return None, message.refusal or ""
    parts = message.content if isinstance(message.content, list) and message.role == "assistant" else []
    thinking = [part for part in parts if part.type == "thinking"]
    if not thinking:
        return None, text_of(message.content, PART_SEPARATOR)
    texts = [part for part in parts if part.type == "text"]
    return text_of(thinking, PART_SEPARATOR), text_of(texts, PART_SEPARATOR)


def _breakpoints(messages: Sequence[Message]) -> Iterator[tuple[int, int]]:
    for index, message in enumerate(messages):
        characters = 0
        for part in message.content if isinstance(message.content, list) else ():
            if part.type == "thinking" and message.role == "assistant":
                continue
            characters += len(part.text)
            if part.prompt_cache_breakpoint is not None:
                yield index, characters
            characters += len(PART_SEPARATOR)


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
