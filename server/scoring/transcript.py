"""The input of decisions as one text: messages, tool calls and their results, in order."""

from __future__ import annotations

import json
from collections.abc import Sequence

from server.http.errors import UNKNOWN_PARAMETER, ApiError, invalid_value, missing_parameter
from server.schemas.decisions import (
    DecisionCallItem,
    DecisionCallOutputItem,
    DecisionMessageItem,
    DecisionRefusalPart,
    Item,
    JsonPart,
    Part,
)


def transcript(input: str | Sequence[Item]) -> str:
    """The text for the prompts; ApiError for a tool result without a call."""
    if isinstance(input, str):
        return input
    called: dict[str, str] = {}
    lines = []
    for at, item in enumerate(input):
        match item:
            case DecisionMessageItem():
                lines.append(f"[{item.role}]\n{text_of(item.content)}")
            case DecisionCallItem():
                called[item.call_id] = item.name
                lines.append(f"[call of {item.name}]\n{_arguments(item, at)}")
            case DecisionCallOutputItem():
                lines.append(f"[answer of {_tool_name(called, item.call_id, at)}]\n{text_of(item.output)}")
    return "\n\n".join(lines)


def text_of(content: str | Sequence[Part]) -> str:
    """The text of a content, with its parts joined."""
    return content if isinstance(content, str) else "\n".join(_written(part) for part in content)


def _written(part: Part) -> str:
    if isinstance(part, JsonPart):
        return json.dumps(part.data, ensure_ascii=False, separators=(",", ":"))
    return part.refusal if isinstance(part, DecisionRefusalPart) else part.text


def _arguments(item: DecisionCallItem, at: int) -> str:
    """Arguments or input of a call, by its type."""
    expected, other = ("arguments", "input") if item.type == "function_call" else ("input", "arguments")
    value, extra = getattr(item, expected), getattr(item, other)
    if value is None or extra is not None:
        place = f"input[{at}].{expected if value is None else other}"
        if value is None:
            raise missing_parameter(place)
        raise ApiError(UNKNOWN_PARAMETER, f"Unknown parameter: '{place}'.", param=place)
    return str(value)


def _tool_name(called: dict[str, str], call_id: str, at: int) -> str:
    if call_id not in called:
        place = f"input[{at}].call_id"
        raise invalid_value(place, "no call before it has this id")
    return called[call_id]
