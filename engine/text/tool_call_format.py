"""How a chat template takes the calls of a conversation: OpenAI's shape as it is, or one that means the same.

A template is a program, and some refuse what others need: ids of nine letters, arguments as text, one call a message.
So it is tried with a call, once, and every conversation is brought into the first shape that it accepts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from engine.chat_format.message import INPUT_FIELD
from engine.text.outline import TEMPLATE_ERRORS, Messages

Message = Mapping[str, object]
# Renders messages with these tools.
Render = Callable[[Messages, Sequence[Mapping[str, object]]], str]

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_SAMPLE_ID = "call_0123456789abcdef01234567"
_SAMPLE_FUNCTION = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
_SAMPLE_USER_MESSAGE = {"role": "user", "content": "And here?"}
_SAMPLE_VALUE = "Graz"


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """What is done to messages and tools before they are rendered.

    no_content     a message that calls has no content; what it says beside is a message before it (DeepSeek R1)
    short_ids      ids are nine letters and digits (Mistral)
    json_arguments       arguments are JSON text, not values
    object_arguments     arguments that are no object become one
    one_call_each     of several calls in a message each has a message of its own, and its result behind it (Llama 3)
    with_descriptions  functions and parameters without a description have an empty one
    """

    no_content: bool = False
    short_ids: bool = False
    json_arguments: bool = False
    object_arguments: bool = False
    one_call_each: bool = False
    with_descriptions: bool = False

    def convert_messages(self, messages: Messages) -> tuple[list[dict[str, object]], list[int]]:
        """The messages in this shape, and which of them each of the given ones begins with."""
        found: list[dict[str, object]] = []
        places: list[int] = []
        for group in _groups(messages):
            calls = _tool_calls(group[0])
            apart = list(self._split_calls(group, calls)) if calls else list(enumerate(group))
            origins = [origin for origin, _ in apart]
            places += [len(found) + origins.index(origin) for origin in range(len(group))]
            found += [self._convert_message(message) for _, message in apart]
        return found, places

    def convert_tools(self, tools: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """The tools in this shape."""
        return [_with_descriptions(tool) for tool in tools] if self.with_descriptions else list(tools)

    def _split_calls(self, group: Sequence[Message], calls: Sequence[Message]) -> Iterator[tuple[int, Message]]:
        """A message that calls with the results behind it as several, and which of the group each of them was.

        Results of other calls stand at the end.
        """
        first, results = group[0], dict(enumerate(group[1:], start=1))
        if self.no_content and first.get("content"):
            yield 0, {key: value for key, value in first.items() if key != "tool_calls"}
            first = {**first, "content": ""}
        for number, some in enumerate([[call] for call in calls] if self.one_call_each else [calls]):
            yield 0, {**first, **({"content": ""} if number else {}), "tool_calls": some}
            ids = [call.get("id") for call in some]
            mine = [
                place
                for place, result in results.items()
                if not self.one_call_each or result.get("tool_call_id") in ids
            ]
            yield from ((place, results.pop(place)) for place in mine)
        yield from results.items()

    def _convert_message(self, message: Message) -> dict[str, object]:
        changed = dict(message)
        if calls := _tool_calls(message):
            changed["tool_calls"] = [self._convert_call(call) for call in calls]
            changed["content"] = None if self.no_content else message.get("content")
        if self.short_ids and isinstance(answered := message.get("tool_call_id"), str):
            changed["tool_call_id"] = _short_id(answered)
        return changed

    def _convert_call(self, call: Message) -> dict[str, object]:
        function = call["function"]
        assert isinstance(function, Mapping)
        changed = {**call, "function": {**function, "arguments": self._convert_arguments(function.get("arguments"))}}
        if self.short_ids and isinstance(id := call.get("id"), str):
            changed["id"] = _short_id(id)
        return changed

    def _convert_arguments(self, arguments: object) -> object:
        # A call without arguments is written as an empty text by some servers.
        if arguments in ("", None):
            arguments = {}
        if self.json_arguments:
            return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {INPUT_FIELD: arguments} if self.object_arguments and not isinstance(arguments, Mapping) else arguments


def detect_tool_call_format(render: Render) -> ToolCallFormat:
    """The first shape that a template accepts; that of OpenAI for one that accepts none."""
    tools: list[dict[str, object]] = [{"type": "function", "function": _SAMPLE_FUNCTION}]

    def shown(shape: ToolCallFormat, messages: Messages) -> bool:
        return _SAMPLE_VALUE in (_try_render(render, shape, messages, tools) or "")

    described = ToolCallFormat(with_descriptions=True)
    accepted = [
        shape
        for shape in (ToolCallFormat(), described)
        if _try_render(render, shape, [_SAMPLE_USER_MESSAGE], tools) is not None
    ]
    found = _first_accepted(render, (*accepted, ToolCallFormat())[0], tools)
    for changed, messages in (
        (replace(found, no_content=True), _sample_messages(1, content="I look.")),
        (replace(found, one_call_each=True), _sample_messages(2)),
        (replace(found, object_arguments=True), _sample_messages(1, arguments=f"[{_SAMPLE_VALUE}")),
    ):
        if not shown(found, messages) and shown(changed, messages):
            found = _merge(found, changed)
    return found


def _merge(one: ToolCallFormat, other: ToolCallFormat) -> ToolCallFormat:
    """What is done in either shape."""
    return ToolCallFormat(*map(operator.or_, astuple(one), astuple(other)))


def _first_accepted(render: Render, base: ToolCallFormat, tools: Sequence[dict[str, object]]) -> ToolCallFormat:
    """The first shape of a call that is shown as it was meant; else the first that is not refused."""
    accepted = []
    for silent, text, short in itertools.product((False, True), repeat=3):
        shape = replace(base, no_content=silent, json_arguments=text, short_ids=short)
        shown = _try_render(render, shape, _sample_messages(1), tools)
        # Values that a template prints as Python does were meant to be text.
        if shown is not None and _SAMPLE_VALUE in shown and "{'city'" not in shown:
            return shape
        if shown is not None:
            accepted.append(shape)
    return next(iter(accepted), base)


def _try_render(
    render: Render, call_format: ToolCallFormat, messages: Messages, tools: Sequence[dict[str, object]]
) -> str | None:
    """What a template makes of messages in a shape; None: it refuses them."""
    try:
        return render(call_format.convert_messages(messages)[0], call_format.convert_tools(tools))
    except TEMPLATE_ERRORS:
        return None


def _sample_messages(calls: int, arguments: object = None, content: str = "") -> list[Message]:
    """A conversation with so many calls at once."""
    given = {"city": _SAMPLE_VALUE} if arguments is None else arguments
    ids = [f"{_SAMPLE_ID[:-1]}{number}" for number in range(calls)]
    made = [{"id": id, "type": "function", "function": {"name": "get_weather", "arguments": given}} for id in ids]
    results = [{"role": "tool", "tool_call_id": id, "content": "sunny"} for id in ids]
    return [_SAMPLE_USER_MESSAGE, {"role": "assistant", "content": content, "tool_calls": made}, *results]


def _groups(messages: Messages) -> Iterator[list[Message]]:
    """Each message alone, but one that calls together with the results that follow it."""
    group: list[Message] = []
    for message in messages:
        if group and not (message.get("role") == "tool" and _tool_calls(group[0])):
            yield group
            group = []
        group.append(message)
    if group:
        yield group


def _tool_calls(message: Message) -> list[Message]:
    calls = message.get("tool_calls")
    return list(calls) if isinstance(calls, Sequence) else []


def _short_id(id: str) -> str:
    """Nine letters and digits for an id, the same for the same one."""
    return id if _SHORT_ID.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:9]


def _with_descriptions(tool: Mapping[str, object]) -> dict[str, object]:
    function = tool["function"]
    assert isinstance(function, Mapping)
    parameters = function["parameters"]
    if isinstance(parameters, Mapping) and isinstance(fields := parameters.get("properties"), Mapping):
        whole = [{"description": "", **field} if isinstance(field, Mapping) else field for field in fields.values()]
        parameters = {**parameters, "properties": dict(zip(fields, whole, strict=True))}
    return {**tool, "function": {"description": "", **function, "parameters": parameters}}
