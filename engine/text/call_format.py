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

from engine.chat_format.message import INPUT
from engine.text.outline import REFUSALS, Messages

Message = Mapping[str, object]
# Renders messages with these tools.
Render = Callable[[Messages, Sequence[Mapping[str, object]]], str]

_SHORT = re.compile(r"[A-Za-z0-9]{9}")
_ID = "call_0123456789abcdef01234567"
_BARE = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
_ASKED = {"role": "user", "content": "And here?"}
_VALUE = "Graz"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """What is done to messages and tools before they are rendered.

    silent     a message that calls has no content; what it says beside is a message before it (DeepSeek R1)
    short      ids are nine letters and digits (Mistral)
    text       arguments are JSON text, not values
    mapped     arguments that are no object become one
    single     of several calls in a message each has a message of its own, and its result behind it (Llama 3)
    described  functions and parameters without a description have an empty one
    """

    silent: bool = False
    short: bool = False
    text: bool = False
    mapped: bool = False
    single: bool = False
    described: bool = False

    def conversation(self, messages: Messages) -> tuple[list[dict[str, object]], list[int]]:
        """The messages in this shape, and which of them each of the given ones begins with."""
        found: list[dict[str, object]] = []
        places: list[int] = []
        for group in _groups(messages):
            calls = _calls(group[0])
            apart = list(self._apart(group, calls)) if calls else list(enumerate(group))
            origins = [origin for origin, _ in apart]
            places += [len(found) + origins.index(origin) for origin in range(len(group))]
            found += [self._message(message) for _, message in apart]
        return found, places

    def tools(self, tools: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """The tools in this shape."""
        return [_described(tool) for tool in tools] if self.described else list(tools)

    def _apart(self, group: Sequence[Message], calls: Sequence[Message]) -> Iterator[tuple[int, Message]]:
        """A message that calls with the results behind it as several, and which of the group each of them was.

        Results of other calls stand at the end.
        """
        first, results = group[0], dict(enumerate(group[1:], start=1))
        if self.silent and first.get("content"):
            yield 0, {key: value for key, value in first.items() if key != "tool_calls"}
            first = {**first, "content": ""}
        for number, some in enumerate([[call] for call in calls] if self.single else [calls]):
            yield 0, {**first, **({"content": ""} if number else {}), "tool_calls": some}
            ids = [call.get("id") for call in some]
            mine = [place for place, result in results.items() if not self.single or result.get("tool_call_id") in ids]
            yield from ((place, results.pop(place)) for place in mine)
        yield from results.items()

    def _message(self, message: Message) -> dict[str, object]:
        changed = dict(message)
        if calls := _calls(message):
            changed["tool_calls"] = [self._call(call) for call in calls]
            changed["content"] = None if self.silent else message.get("content")
        if self.short and isinstance(answered := message.get("tool_call_id"), str):
            changed["tool_call_id"] = _short(answered)
        return changed

    def _call(self, call: Message) -> dict[str, object]:
        function = call["function"]
        assert isinstance(function, Mapping)
        changed = {**call, "function": {**function, "arguments": self._arguments(function.get("arguments"))}}
        if self.short and isinstance(id := call.get("id"), str):
            changed["id"] = _short(id)
        return changed

    def _arguments(self, arguments: object) -> object:
        # A call without arguments is written as an empty text by some servers.
        if arguments in ("", None):
            arguments = {}
        if self.text:
            return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {INPUT: arguments} if self.mapped and not isinstance(arguments, Mapping) else arguments


def find_call_format(render: Render) -> CallFormat:
    """The first shape that a template accepts; that of OpenAI for one that accepts none."""
    tools: list[dict[str, object]] = [{"type": "function", "function": _BARE}]

    def shown(shape: CallFormat, messages: Messages) -> bool:
        return _VALUE in (_rendered(render, shape, messages, tools) or "")

    described = CallFormat(described=True)
    accepted = [shape for shape in (CallFormat(), described) if _rendered(render, shape, [_ASKED], tools) is not None]
    found = _accepted(render, (*accepted, CallFormat())[0], tools)
    for changed, messages in (
        (replace(found, silent=True), _conversation(1, content="I look.")),
        (replace(found, single=True), _conversation(2)),
        (replace(found, mapped=True), _conversation(1, arguments=f"[{_VALUE}")),
    ):
        if not shown(found, messages) and shown(changed, messages):
            found = _both(found, changed)
    return found


def _both(one: CallFormat, other: CallFormat) -> CallFormat:
    """What is done in either shape."""
    return CallFormat(*map(operator.or_, astuple(one), astuple(other)))


def _accepted(render: Render, start: CallFormat, tools: Sequence[dict[str, object]]) -> CallFormat:
    """The first shape of a call that is shown as it was meant; else the first that is not refused."""
    accepted = []
    for silent, text, short in itertools.product((False, True), repeat=3):
        shape = replace(start, silent=silent, text=text, short=short)
        shown = _rendered(render, shape, _conversation(1), tools)
        # Values that a template prints as Python does were meant to be text.
        if shown is not None and _VALUE in shown and "{'city'" not in shown:
            return shape
        if shown is not None:
            accepted.append(shape)
    return next(iter(accepted), start)


def _rendered(render: Render, shape: CallFormat, messages: Messages, tools: Sequence[dict[str, object]]) -> str | None:
    """What a template makes of messages in a shape; None: it refuses them."""
    try:
        return render(shape.conversation(messages)[0], shape.tools(tools))
    except REFUSALS:
        return None


def _conversation(calls: int, arguments: object = None, content: str = "") -> list[Message]:
    """A conversation with so many calls at once."""
    given = {"city": _VALUE} if arguments is None else arguments
    ids = [f"{_ID[:-1]}{number}" for number in range(calls)]
    made = [{"id": id, "type": "function", "function": {"name": "get_weather", "arguments": given}} for id in ids]
    results = [{"role": "tool", "tool_call_id": id, "content": "sunny"} for id in ids]
    return [_ASKED, {"role": "assistant", "content": content, "tool_calls": made}, *results]


def _groups(messages: Messages) -> Iterator[list[Message]]:
    """Each message alone, but one that calls together with the results that follow it."""
    group: list[Message] = []
    for message in messages:
        if group and not (message.get("role") == "tool" and _calls(group[0])):
            yield group
            group = []
        group.append(message)
    if group:
        yield group


def _calls(message: Message) -> list[Message]:
    calls = message.get("tool_calls")
    return list(calls) if isinstance(calls, Sequence) else []


def _short(id: str) -> str:
    """Nine letters and digits for an id, the same for the same one."""
    return id if _SHORT.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:9]


def _described(tool: Mapping[str, object]) -> dict[str, object]:
    function = tool["function"]
    assert isinstance(function, Mapping)
    parameters = function["parameters"]
    if isinstance(parameters, Mapping) and isinstance(fields := parameters.get("properties"), Mapping):
        whole = [{"description": "", **field} if isinstance(field, Mapping) else field for field in fields.values()]
        parameters = {**parameters, "properties": dict(zip(fields, whole, strict=True))}
    return {**tool, "function": {"description": "", **function, "parameters": parameters}}
