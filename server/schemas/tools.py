"""Tools of requests: definitions, tool choice, and tool calls of the history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Discriminator, Field, StringConstraints, Tag

from server.schemas import policy
from server.schemas.content import MAX_KEYS, Object, Strict, one_of

# OpenAI's characters and length, and dots, which MCP servers put between their name and the tool's.
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
# A JSON schema; it is interpreted when the grammar is built.
Schema = Annotated[dict[str, object], Field(max_length=MAX_KEYS)]

# Validated, but not part of the value: omitted in responses.
Kind = TypeVar("Kind")
Beside = Annotated[Kind | None, Field(exclude=True)]

FunctionKind = Annotated[Literal["function"], one_of("function", "custom")]

MAX_TOOLS = 256


class FunctionDefinition(Strict):
    """Definition of a function. Without `parameters` it takes none."""

    hints: ClassVar[Mapping[str, str]] = policy.PART_HINTS

    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class FunctionTool(Strict):
    """A function tool."""

    hints: ClassVar[Mapping[str, str]] = policy.PART_HINTS

    type: FunctionKind
    function: FunctionDefinition


class TextInput(Strict):
    """Unconstrained text."""

    type: Literal["text"]


class GrammarDefinition(Strict):
    """Grammar of a text: llguidance's Lark, or a regular expression without lookaround."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, StringConstraints(min_length=1, max_length=65536)]


class GrammarInput(Strict):
    """Text that follows a grammar."""

    type: Literal["grammar"]
    grammar: GrammarDefinition


class CustomDefinition(Strict):
    """Definition of a custom tool with text input."""

    name: FunctionName
    description: str | None = None
    format: Annotated[TextInput | GrammarInput, Field(discriminator="type")] | None = None


class CustomTool(Strict):
    """A custom tool."""

    hints: ClassVar[Mapping[str, str]] = policy.PART_HINTS

    type: Literal["custom"]
    custom: CustomDefinition


def kind_of(value: object) -> str:
    """The discriminator tag; tags differ from all field names, so that error paths are unambiguous."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "a_custom" if kind == "custom" else "a_function"


ToolDefinition = Annotated[
    Annotated[FunctionTool, Tag("a_function")] | Annotated[CustomTool, Tag("a_custom")], Discriminator(kind_of)
]


class LegacyFunction(Strict):
    """A function in OpenAI's older `functions`."""

    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None


class ToolName(Strict):
    """A tool by name. Some clients send the complete definition; its other fields are ignored."""

    name: FunctionName
    description: Beside[str] = None
    parameters: Beside[Schema] = None
    strict: Beside[bool] = None
    format: Beside[Object] = None


class NamedFunction(Strict):
    """This function must be called."""

    type: FunctionKind
    function: ToolName


class NamedCustom(Strict):
    """This custom tool must be called."""

    type: Literal["custom"]
    custom: ToolName


NamedChoice = Annotated[
    Annotated[NamedFunction, Tag("a_function")] | Annotated[NamedCustom, Tag("a_custom")], Discriminator(kind_of)
]


class AllowedTools(Strict):
    """The allowed tools, and whether one must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Strict):
    """Restriction to some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice(value: object) -> str:
    if not isinstance(value, dict):
        return "mode"
    return "allowed" if value.get("type") == "allowed_tools" else kind_of(value)


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedFunction, Tag("a_function")]
    | Annotated[NamedCustom, Tag("a_custom")]
    | Annotated[AllowedChoice, Tag("allowed")],
    Discriminator(_choice),
]


def _legacy_choice(value: object) -> str:
    return "named" if isinstance(value, dict) else "mode"


LegacyChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("mode")] | Annotated[ToolName, Tag("named")],
    Discriminator(_legacy_choice),
]


class CalledFunction(Strict):
    """Function of an earlier call, with its arguments as JSON text."""

    name: Annotated[str, StringConstraints(max_length=256)]
    arguments: str


class CalledCustom(Strict):
    """Custom tool of an earlier call, with its input."""

    name: Annotated[str, StringConstraints(max_length=256)]
    input: str


class FunctionCall(Strict):
    """A function call of the history. Fields of streamed deltas are accepted."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.FUNCTION_CALL

    id: Annotated[str, StringConstraints(max_length=256)]
    type: FunctionKind = "function"
    function: CalledFunction
    index: int | None = None


class CustomCall(Strict):
    """A custom tool call of the history."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.CUSTOM_CALL

    id: Annotated[str, StringConstraints(max_length=256)]
    type: Literal["custom"]
    custom: CalledCustom
    index: int | None = None


ToolCall = Annotated[
    Annotated[FunctionCall, Tag("a_function")] | Annotated[CustomCall, Tag("a_custom")], Discriminator(kind_of)
]
