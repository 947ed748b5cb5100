"""An answer as its reader takes it: text, reasoning and tool calls, in pieces as they come; and the tools."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

ToolMode = Literal["none", "auto", "required"]
# A function takes an object; a custom tool takes a text, which models that know only functions give as this argument.
ToolKind = Literal["function", "custom"]
INPUT_FIELD = "input"
ConstraintKind = Literal["json_schema", "json_object", "regex", "choices", "grammar"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call.

    parameters  a JSON schema, as JSON text
    strict      whether arguments must follow the schema exactly
    grammar     of a custom tool: what its text must follow, in Lark; "": the schema says all
    """

    name: str
    description: str = ""
    parameters: str = '{"type": "object", "properties": {}}'
    strict: bool = False
    kind: ToolKind = "function"
    grammar: str = ""


def custom_tool(name: str, description: str = "", *, pattern: str = "", grammar: str = "") -> Tool:
    """A tool that takes a text: any, one that follows a regular expression, or one that follows a grammar in Lark."""
    taken: dict[str, object] = {"type": "string"}
    if pattern:
        taken["pattern"] = f"^(?:{pattern})$"
    if grammar:
        taken["description"] = f"A text that follows this Lark grammar:\n{grammar}"
    schema = {
        "type": "object",
        "properties": {INPUT_FIELD: taken},
        "required": [INPUT_FIELD],
        "additionalProperties": False,
    }
    parameters = json.dumps(schema, ensure_ascii=False)
    return Tool(name, description, parameters, strict=True, kind="custom", grammar=grammar)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools must be called, and which may be; no names: all. `parallel`: more than one in an answer."""

    mode: ToolMode = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class AnswerConstraint:
    """What the text of an answer must be, behind its reasoning.

    source   of "json_schema" the schema as JSON text, of "regex" the expression (without lookaround), of "grammar" Lark
             in llguidance's dialect, or GBNF
    choices  of "choices": the answer is one of these
    strict   of "json_schema": whether it is followed exactly, or as far as it can be
    """

    kind: ConstraintKind
    source: str = ""
    choices: tuple[str, ...] = ()
    strict: bool = True


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of what is said to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what is said before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The call number `index` of this answer begins."""

    index: int
    name: str
    kind: ToolKind = "function"


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the arguments of call number `index`: of their JSON text, or of the text that a custom tool takes."""

    index: int
    text: str


AnswerDelta = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta
