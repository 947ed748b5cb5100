"""The format of tool calls that a chat template accepts: that of OpenAI, or an equivalent.

Templates differ: some demand ids of nine characters, arguments as text or one call a message, others refuse them. So at
load the template renders a sample conversation in each format; the first that it accepts is used.
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
# Renders messages and tools with the chat template.
Render = Callable[[Messages, Sequence[Mapping[str, object]]], str]

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_SAMPLE_ID = "call_0123456789abcdef01234567"
_SAMPLE_FUNCTION = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
_SAMPLE_USER_MESSAGE = {"role": "user", "content": "And here?"}
_SAMPLE_VALUE = "Graz"


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """A conversion of messages and tools before they are rendered.

    no_content         a message with tool calls has no content; its text becomes a message before it (DeepSeek R1)
    short_ids          ids have nine letters and digits (Mistral)
    json_arguments     arguments are JSON text, not values
    object_arguments   arguments that are not an object are wrapped in one
    one_call_each      each tool call becomes a message, followed by its result (Llama 3)
    with_descriptions  functions and parameters without a description get an empty one
    """

    no_content: bool = False
    short_ids: bool = False
    json_arguments: bool = False
    object_arguments: bool = False
    one_call_each: bool = False
    with_descriptions: bool = False

    def convert_messages(self, messages: Messages) -> tuple[list[dict[str, object]], list[int]]:
        """The converted messages, and for each input message the index of the first one made from it."""
        converted: list[dict[str, object]] = []
        indices: list[int] = []
        for group in _groups(messages):
            calls = _tool_calls(group[0])
            split = list(self._split_calls(group, calls)) if calls else list(enumerate(group))
            origins = [origin for origin, _ in split]
            indices += [len(converted) + origins.index(origin) for origin in range(len(group))]
            converted += [self._convert_message(message) for _, message in split]
        return converted, indices

    def convert_tools(self, tools: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """The converted tools."""
        return [_with_descriptions(tool) for tool in tools] if self.with_descriptions else list(tools)

    def _split_calls(self, group: Sequence[Message], calls: Sequence[Message]) -> Iterator[tuple[int, Message]]:
        """Split a message with tool calls and the results after it; each part with its index in the group.

        Results of other calls come last.
        """
        first, results = group[0], dict(enumerate(group[1:], start=1))
        if self.no_content and first.get("content"):
            yield 0, {key: value for key, value in first.items() if key != "tool_calls"}
            first = {**first, "content": ""}
        if not self.one_call_each:
            yield 0, {**first, "tool_calls": calls}
            yield from results.items()
            return
        for number, call in enumerate(calls):
            yield 0, {**first, **({"content": ""} if number else {}), "tool_calls": [call]}
            matching = [index for index, result in results.items() if result.get("tool_call_id") == call.get("id")]
            yield from [(index, results.pop(index)) for index in matching]
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
        # Some servers write an empty text for a call without arguments.
        if arguments in ("", None):
            arguments = {}
        if self.json_arguments:
            return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {INPUT_FIELD: arguments} if self.object_arguments and not isinstance(arguments, Mapping) else arguments


def detect_tool_call_format(render: Render) -> ToolCallFormat:
    """The first format that the template accepts; that of OpenAI if it accepts none."""
    tools: list[dict[str, object]] = [{"type": "function", "function": _SAMPLE_FUNCTION}]

    def renders_value(candidate: ToolCallFormat, messages: Messages) -> bool:
        return _SAMPLE_VALUE in (_try_render(render, candidate, messages, tools) or "")

    described = ToolCallFormat(with_descriptions=True)
    accepted = [
        candidate
        for candidate in (ToolCallFormat(), described)
        if _try_render(render, candidate, [_SAMPLE_USER_MESSAGE], tools) is not None
    ]
    detected = _first_accepted(render, (*accepted, ToolCallFormat())[0], tools)
    for changed, messages in (
        (replace(detected, no_content=True), _sample_messages(1, content="I look.")),
        (replace(detected, one_call_each=True), _sample_messages(2)),
        (replace(detected, object_arguments=True), _sample_messages(1, arguments=f"[{_SAMPLE_VALUE}")),
    ):
        if not renders_value(detected, messages) and renders_value(changed, messages):
            detected = _merge(detected, changed)
    return detected


def _merge(first: ToolCallFormat, second: ToolCallFormat) -> ToolCallFormat:
    """Both conversions."""
    return ToolCallFormat(*map(operator.or_, astuple(first), astuple(second)))


def _first_accepted(render: Render, base: ToolCallFormat, tools: Sequence[dict[str, object]]) -> ToolCallFormat:
    """The first format with which the template renders a call correctly; else the first that it does not refuse."""
    accepted = []
    for no_content, json_arguments, short_ids in itertools.product((False, True), repeat=3):
        candidate = replace(base, no_content=no_content, json_arguments=json_arguments, short_ids=short_ids)
        rendered = _try_render(render, candidate, _sample_messages(1), tools)
        # A template that prints a Python dict expects arguments as text.
        if rendered is not None and _SAMPLE_VALUE in rendered and "{'city'" not in rendered:
            return candidate
        if rendered is not None:
            accepted.append(candidate)
    return next(iter(accepted), base)


def _try_render(
    render: Render, call_format: ToolCallFormat, messages: Messages, tools: Sequence[dict[str, object]]
) -> str | None:
    """The rendered messages; None if the template refuses them."""
    try:
        return render(call_format.convert_messages(messages)[0], call_format.convert_tools(tools))
    except TEMPLATE_ERRORS:
        return None


def _sample_messages(calls: int, arguments: object = None, content: str = "") -> list[Message]:
    """A conversation with `calls` parallel tool calls and their results."""
    function = {"name": "get_weather", "arguments": {"city": _SAMPLE_VALUE} if arguments is None else arguments}
    ids = [f"{_SAMPLE_ID[:-1]}{number}" for number in range(calls)]
    tool_calls = [{"id": id, "type": "function", "function": function} for id in ids]
    results = [{"role": "tool", "tool_call_id": id, "content": "sunny"} for id in ids]
    return [_SAMPLE_USER_MESSAGE, {"role": "assistant", "content": content, "tool_calls": tool_calls}, *results]


def _groups(messages: Messages) -> Iterator[list[Message]]:
    """Messages one by one; a message with tool calls together with the tool results after it."""
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
    """An id of nine letters and digits, a function of the given one."""
    return id if _SHORT_ID.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:9]


def _with_descriptions(tool: Mapping[str, object]) -> dict[str, object]:
    function = tool["function"]
    assert isinstance(function, Mapping)
    parameters = function["parameters"]
    if isinstance(parameters, Mapping) and isinstance(fields := parameters.get("properties"), Mapping):
        described = [{"description": "", **field} if isinstance(field, Mapping) else field for field in fields.values()]
        parameters = {**parameters, "properties": dict(zip(fields, described, strict=True))}
    return {**tool, "function": {"description": "", **function, "parameters": parameters}}
