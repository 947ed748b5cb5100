"""A conversation as templates expect it: what OpenAI's messages become before they are rendered."""

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

# No template here knows the name that OpenAI gave the system role later, nor the first one of the tool role.
ROLES = {"developer": "system", "function": "tool"}
# What joins the parts of a content.
PART_SEPARATOR = "\n"
# Of one body; of more the latest count, as at OpenAI. Each costs a rendering of the messages before it.
MAX_BREAKPOINTS = 4


@dataclass(frozen=True, slots=True)
class PreparedMessages:
    """Messages with the keys that are there, and the places in them that are worth keeping.

    breakpoints  (message, letters of its content before the place); MAX_BREAKPOINTS at most
    """

    messages: list[dict[str, object]] = field(default_factory=list)
    breakpoints: tuple[tuple[int, int], ...] = ()


def prepare_messages(messages: Sequence[Message]) -> PreparedMessages:
    """The messages of a body; ApiError at one that lacks what its role needs."""
    plain: list[dict[str, object]] = []
    arguments = _ArgumentDecoder()
    called = 0
    for place, message in enumerate(messages):
        _check(message, f"messages[{place}]")
        called = place if message.function_call is not None else called
        # Functions had no ids: what one answered belongs to the latest call.
        plain.append(_plain(message, f"call_{called}", arguments))
    latest = deque(_breakpoints(messages), maxlen=MAX_BREAKPOINTS)
    return PreparedMessages(plain, tuple(latest))


def has_breakpoints(messages: Sequence[Message]) -> bool:
    """Whether a client says where prompts are worth keeping."""
    return any(True for _ in _breakpoints(messages))


def _check(message: Message, place: str) -> None:
    called = message.tool_calls or message.function_call
    if message.content is None and message.role != "assistant":
        raise invalid_value(f"{place}.content", f"a message of the role '{message.role}' needs it")
    if message.role != "assistant" and called:
        field = "tool_calls" if message.tool_calls else "function_call"
        raise invalid_value(f"{place}.{field}", "only the assistant calls tools")
    needed = {"tool": "tool_call_id", "function": "name"}.get(message.role)
    if needed and getattr(message, needed) is None:
        raise missing_parameter(f"{place}.{needed}")


def _plain(message: Message, legacy_id: str, arguments: _ArgumentDecoder) -> dict[str, object]:
    plain: dict[str, object] = {"role": ROLES.get(message.role, message.role), "content": ""}
    if message.content is not None:
        plain["content"] = text_of(message.content, PART_SEPARATOR)
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    answered = legacy_id if message.role == "function" else message.tool_call_id
    found = {"name": message.name, "tool_call_id": answered, "reasoning_content": reasoning}
    plain.update({key: value for key, value in found.items() if value is not None})
    calls = [_call(call.id, *_called(call, arguments)) for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls = [_call(legacy_id, message.function_call.name, arguments.read(message.function_call))]
    if calls:
        plain["tool_calls"] = calls
    return plain


def _breakpoints(messages: Sequence[Message]) -> Iterator[tuple[int, int]]:
    for place, message in enumerate(messages):
        letters = 0
        for part in message.content if isinstance(message.content, list) else ():
            letters += len(part.text)
            if part.prompt_cache_breakpoint is not None:
                yield place, letters
            letters += len(PART_SEPARATOR)


def _call(id: str, name: str, arguments: object) -> dict[str, object]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _called(call: ToolCall, arguments: _ArgumentDecoder) -> tuple[str, object]:
    """What was called, and with what. Templates know functions only: the text of a custom tool is an argument there."""
    if isinstance(call, CustomCall):
        return call.custom.name, {INPUT_FIELD: call.custom.input}
    return call.function.name, arguments.read(call.function)


@dataclass(slots=True)
class _ArgumentDecoder:
    """Arguments of calls as templates print them: with tojson, which would escape a string a second time.

    values_left  values that all calls of a conversation may still have. The caps of a body do not see them inside of strings.
    """

    values_left: int = MAX_NODES

    def read(self, function: CalledFunction) -> object:
        """The object. What is no strict JSON, too deep for a template, or beyond the values left, stays text."""
        text = function.arguments
        self.values_left -= text.count("{") + text.count("[") + text.count('"') // 2 + text.count(",") // 4
        if self.values_left < 0:
            return text
        try:
            return loads(text.encode())
        except ApiError:
            return text
