"""Tools of a request, constraints on its answer, and the deltas of a parsed answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

ToolMode = Literal["none", "auto", "required"]
# The argument of a function is an object; of a custom tool it is text. Models know functions only: for them a custom
# tool is a function with one argument of this name.
ToolKind = Literal["function", "custom"]
INPUT_FIELD = "input"
ConstraintKind = Literal["json_schema", "json_object", "regex", "choices", "grammar"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call.

    parameters  JSON schema, as JSON text
    strict      whether arguments must follow the schema exactly
    grammar     Lark grammar of a custom tool's text; "": the schema is the whole constraint
    """

    name: str
    description: str = ""
    parameters: str = '{"type": "object", "properties": {}}'
    strict: bool = False
    kind: ToolKind = "function"
    grammar: str = ""


def custom_tool(name: str, description: str = "", *, pattern: str = "", grammar: str = "") -> Tool:
    """A tool with text input: unconstrained, or constrained by a regular expression or a Lark grammar."""
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
    """Whether tools must be called, and which; no names: all of them. `parallel`: an answer may have several calls."""

    mode: ToolMode = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class AnswerConstraint:
    """Constraint on the text of an answer, after its reasoning.

    source   JSON schema as text, regular expression (without lookaround), or grammar in llguidance's Lark or GBNF
    choices  kind "choices": the answer is one of them
    strict   kind "json_schema": whether unsupported keywords are an error; else they are ignored
    """

    kind: ConstraintKind
    source: str = ""
    choices: tuple[str, ...] = ()
    strict: bool = True


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The tool call number `index` of this answer begins."""

    index: int
    name: str
    kind: ToolKind = "function"


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More arguments of tool call number `index`: of their JSON text, or of the text input of a custom tool."""

    index: int
    text: str


AnswerDelta = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta
