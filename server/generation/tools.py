"""Tools of a chat request and the tool choice, by OpenAI's current and older names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from engine.chat_format.message import Tool, ToolChoice, custom_tool
from server.http.errors import invalid_value
from server.schemas.chat import ChatRequest
from server.schemas.tools import (
    AllowedChoice,
    CustomDefinition,
    CustomTool,
    FunctionDefinition,
    GrammarInput,
    LegacyFunction,
    NamedChoice,
    NamedCustom,
    NamedFunction,
    Schema,
    ToolDefinition,
    ToolName,
)

# Any definition of a tool.
Definition = FunctionDefinition | LegacyFunction | CustomDefinition

# For OpenAI, a function without parameters takes none, and an empty schema allows any.
EMPTY_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_PARAMETERS: Schema = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolSet:
    """Tools that the model may call, and the tool choice.

    legacy  whether they are `functions`: then the answer has one `function_call` instead of `tool_calls`
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice("none")
    legacy: bool = False


def tool_set(body: ChatRequest) -> ToolSet:
    """Tools of the body; ApiError for contradictions."""
    if body.functions and body.tools:
        raise invalid_value("functions", "it is the older name of 'tools'; give one of them")
    if body.functions:
        tools = _tools([(f"functions[{index}]", function) for index, function in enumerate(body.functions)])
        choice = _legacy_choice(body, tools)
    else:
        tools = _tools([_defined(index, tool) for index, tool in enumerate(body.tools or ())])
        choice = _choice(body, tools)
    # Tools are not rendered with mode "none": the model cannot call them.
    return ToolSet(() if choice.mode == "none" else tools, choice, legacy=bool(body.functions))


def tool_path(index: int, tool: Tool, *, legacy: bool) -> str:
    """Path of tool number `index` in a body."""
    return f"functions[{index}]" if legacy else f"tools[{index}].{tool.kind}"


def _defined(index: int, tool: ToolDefinition) -> tuple[str, Definition]:
    if isinstance(tool, CustomTool):
        return f"tools[{index}].custom", tool.custom
    return f"tools[{index}].function", tool.function


def _tools(definitions: Sequence[tuple[str, Definition]]) -> tuple[Tool, ...]:
    seen: set[str] = set()
    for place, definition in definitions:
        if definition.name in seen:
            raise invalid_value(f"{place}.name", "another tool has this name")
        seen.add(definition.name)
        if isinstance(definition, CustomDefinition):
            continue
        if _parameters(definition).get("type", "object") != "object":
            raise invalid_value(f"{place}.parameters.type", "it must be 'object'")
    return tuple(_tool(definition) for _, definition in definitions)


def _tool(definition: Definition) -> Tool:
    if isinstance(definition, CustomDefinition):
        return _custom(definition)
    return Tool(
        name=definition.name,
        description=definition.description or "",
        parameters=json.dumps(_parameters(definition), ensure_ascii=False),
        strict=isinstance(definition, FunctionDefinition) and definition.strict is True,
    )


def _parameters(definition: FunctionDefinition | LegacyFunction) -> Schema:
    return EMPTY_PARAMETERS if definition.parameters is None else definition.parameters or ANY_PARAMETERS


def _custom(definition: CustomDefinition) -> Tool:
    asked = definition.format.grammar if isinstance(definition.format, GrammarInput) else None
    pattern = asked.definition if asked is not None and asked.syntax == "regex" else ""
    grammar = asked.definition if asked is not None and asked.syntax == "lark" else ""
    return custom_tool(definition.name, definition.description or "", pattern=pattern, grammar=grammar)


def _choice(body: ChatRequest, tools: Sequence[Tool]) -> ToolChoice:
    if isinstance(body.function_call, ToolName):
        raise invalid_value("function_call", "there are no 'functions'")
    chosen, parallel = body.tool_choice, body.parallel_tool_calls is not False
    if not tools:
        if chosen in (None, "none", "auto"):
            return ToolChoice("none")
        raise invalid_value("tool_choice", "there are no 'tools' to choose from")
    match chosen:
        case NamedFunction() | NamedCustom():
            names = _check_names([chosen], tools, "tool_choice")
            return ToolChoice("required", names, parallel=False)
        case AllowedChoice():
            allowed = chosen.allowed_tools
            names = _check_names(allowed.tools, tools, "tool_choice.allowed_tools.tools[{}]")
            return ToolChoice(allowed.mode, names, parallel)
        case _:
            return ToolChoice(chosen or "auto", (), parallel)


def _legacy_choice(body: ChatRequest, tools: Sequence[Tool]) -> ToolChoice:
    if body.tool_choice is not None:
        raise invalid_value("tool_choice", "with 'functions' it is called 'function_call'")
    if isinstance(body.function_call, ToolName):
        if body.function_call.name not in {tool.name for tool in tools}:
            raise invalid_value("function_call.name", "there is no function of this name")
        return ToolChoice("required", (body.function_call.name,), parallel=False)
    return ToolChoice(body.function_call or "auto", (), parallel=False)


def _check_names(chosen: Sequence[NamedChoice], tools: Sequence[Tool], place: str) -> tuple[str, ...]:
    """The chosen names; `place`: their path in the body."""
    known = {(tool.kind, tool.name) for tool in tools}
    names = [(choice.type, _named(choice).name) for choice in chosen]
    for index, (kind, name) in enumerate(names):
        if (kind, name) not in known:
            raise invalid_value(f"{place.format(index)}.{kind}.name", "there is no tool of this name")
    return tuple(dict.fromkeys(name for _, name in names))


def _named(choice: NamedChoice) -> ToolName:
    return choice.custom if isinstance(choice, NamedCustom) else choice.function
