"""The input of decisions as one text: messages, calls of tools and what these answered, in order."""

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
    """The text that questions are asked about; ApiError at the output of a tool that nobody called."""
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
    """A text, its parts joined."""
    return content if isinstance(content, str) else "\n".join(_written(part) for part in content)


def _written(part: Part) -> str:
    if isinstance(part, JsonPart):
        return json.dumps(part.data, ensure_ascii=False, separators=(",", ":"))
    return part.refusal if isinstance(part, DecisionRefusalPart) else part.text


def _arguments(item: DecisionCallItem, at: int) -> str:
    """What the call says, under the name that its type has for it."""
    wanted, other = ("arguments", "input") if item.type == "function_call" else ("input", "arguments")
    said, extra = getattr(item, wanted), getattr(item, other)
    if said is None or extra is not None:
        place = f"input[{at}].{wanted if said is None else other}"
        if said is None:
            raise missing_parameter(place)
        raise ApiError(UNKNOWN_PARAMETER, f"Unknown parameter: '{place}'.", param=place)
    return str(said)


def _tool_name(called: dict[str, str], call_id: str, at: int) -> str:
    if call_id not in called:
        place = f"input[{at}].call_id"
        raise invalid_value(place, "no call before it has this id")
    return called[call_id]
