"""What a chat may call: the tools of its body, under either of OpenAI's names, and the choice among them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from engine.message import Tool, ToolChoice
from server.errors import INVALID_VALUE, ApiError
from server.schemas.chat import ChatRequest
from server.schemas.tools import AllowedChoice, FunctionDefinition, FunctionNamed, LegacyFunction, NamedChoice, Schema

# No parameters, as OpenAI reads a function without them.
NOTHING: Schema = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools that the model is shown, and what it may do with them.

    legacy  whether they came as `functions`, whose answer has one `function_call` in place of `tool_calls`
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice("none")
    legacy: bool = False


def offer(body: ChatRequest) -> Offer:
    """What the body offers; ApiError at what contradicts itself."""
    if body.functions and body.tools:
        raise _invalid("functions", "it is the older name of 'tools'; give one of them")
    if body.functions:
        tools = _tools(body.functions, "functions[{}]")
        choice = _legacy_choice(body, tools)
    else:
        tools = _tools([tool.function for tool in body.tools or ()], "tools[{}].function")
        choice = _choice(body, tools)
    # A model that sees no tools calls none.
    return Offer(() if choice.mode == "none" else tools, choice, legacy=bool(body.functions))


def _tools(functions: Sequence[FunctionDefinition | LegacyFunction], place: str) -> tuple[Tool, ...]:
    seen: set[str] = set()
    for at, function in enumerate(functions):
        if function.name in seen:
            raise _invalid(f"{place.format(at)}.name", "another tool has this name")
        seen.add(function.name)
        kind = (function.parameters or NOTHING).get("type", "object")
        if kind != "object":
            raise _invalid(f"{place.format(at)}.parameters.type", "it must be 'object'")
    return tuple(_tool(function) for function in functions)


def _tool(function: FunctionDefinition | LegacyFunction) -> Tool:
    return Tool(
        name=function.name,
        description=function.description or "",
        parameters=json.dumps(function.parameters or NOTHING, ensure_ascii=False),
        strict=isinstance(function, FunctionDefinition) and function.strict is True,
    )


def _choice(body: ChatRequest, tools: Sequence[Tool]) -> ToolChoice:
    if isinstance(body.function_call, FunctionNamed):
        raise _invalid("function_call", "there are no 'functions'")
    chosen, parallel = body.tool_choice, body.parallel_tool_calls is not False
    if not tools:
        if chosen in (None, "none", "auto"):
            return ToolChoice("none")
        raise _invalid("tool_choice", "there are no 'tools' to choose from")
    match chosen:
        case NamedChoice():
            names = _known([chosen], tools, "tool_choice.function.name")
            return ToolChoice("required", names, parallel=False)
        case AllowedChoice():
            allowed = chosen.allowed_tools
            names = _known(allowed.tools, tools, "tool_choice.allowed_tools.tools[{}].function.name")
            return ToolChoice(allowed.mode, names, parallel)
        case _:
            return ToolChoice(chosen or "auto", (), parallel)


def _legacy_choice(body: ChatRequest, tools: Sequence[Tool]) -> ToolChoice:
    if body.tool_choice is not None:
        raise _invalid("tool_choice", "with 'functions' it is called 'function_call'")
    if isinstance(body.function_call, FunctionNamed):
        if body.function_call.name not in {tool.name for tool in tools}:
            raise _invalid("function_call.name", "there is no function of this name")
        return ToolChoice("required", (body.function_call.name,), parallel=False)
    return ToolChoice(body.function_call or "auto", (), parallel=False)


def _known(chosen: Sequence[NamedChoice], tools: Sequence[Tool], place: str) -> tuple[str, ...]:
    known = {tool.name for tool in tools}
    for at, choice in enumerate(chosen):
        if choice.function.name not in known:
            raise _invalid(place.format(at), "there is no tool of this name")
    return tuple(dict.fromkeys(choice.function.name for choice in chosen))


def _invalid(field: str, reason: str) -> ApiError:
    return ApiError(INVALID_VALUE, f"Invalid value for '{field}': {reason}.", param=field)
