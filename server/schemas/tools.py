"""Tools as requests hold them: what may be called, what must be, and what was called before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Discriminator, Field, StringConstraints, Tag

from server.schemas import policy
from server.schemas.content import MOST_KEYS, Object, Strict, one_of

# OpenAI's letters and length, and the dots that servers of tools (MCP) put between their name and the tool's.
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
# A JSON schema. What it means is read where it becomes a grammar.
Schema = Annotated[dict[str, object], Field(max_length=MOST_KEYS)]

# Read, and no part of what the value says: left out where it is written down again.
Kind = TypeVar("Kind")
Beside = Annotated[Kind | None, Field(exclude=True)]

FunctionKind = Annotated[Literal["function"], one_of("function", "custom")]

MOST_TOOLS = 256


class FunctionDefinition(Strict):
    """A function that may be called. Without `parameters` it takes none."""

    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class FunctionTool(Strict):
    """A function that may be called."""

    type: FunctionKind
    function: FunctionDefinition


class TextInput(Strict):
    """Any text."""

    type: Literal["text"]


class GrammarDefinition(Strict):
    """What a text must follow: Lark as llguidance reads it, or a regular expression without lookaround."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, StringConstraints(min_length=1, max_length=65536)]


class GrammarInput(Strict):
    """A text that follows a grammar."""

    type: Literal["grammar"]
    grammar: GrammarDefinition


class CustomDefinition(Strict):
    """A tool that takes a text, and what that must be."""

    name: FunctionName
    description: str | None = None
    format: Annotated[TextInput | GrammarInput, Field(discriminator="type")] | None = None


class CustomTool(Strict):
    """A tool that takes a text."""

    type: Literal["custom"]
    custom: CustomDefinition


def kind_of(value: object) -> str:
    """Whether it is about a function or about a custom tool. No field has these names: paths of errors tell by that."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "a_custom" if kind == "custom" else "a_function"


ToolDefinition = Annotated[
    Annotated[FunctionTool, Tag("a_function")] | Annotated[CustomTool, Tag("a_custom")], Discriminator(kind_of)
]


class LegacyFunction(Strict):
    """A function under the name that OpenAI gave its tools first."""

    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None


class Named(Strict):
    """A tool by its name. The rest of its definition may stand beside it, for some clients send the whole tool."""

    name: FunctionName
    description: Beside[str] = None
    parameters: Beside[Schema] = None
    strict: Beside[bool] = None
    format: Beside[Object] = None


class NamedFunction(Strict):
    """This function must be called."""

    type: FunctionKind
    function: Named


class NamedCustom(Strict):
    """This custom tool must be called."""

    type: Literal["custom"]
    custom: Named


NamedChoice = Annotated[
    Annotated[NamedFunction, Tag("a_function")] | Annotated[NamedCustom, Tag("a_custom")], Discriminator(kind_of)
]


class AllowedTools(Strict):
    """The tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MOST_TOOLS)]


class AllowedChoice(Strict):
    """Some of the tools may be called."""

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
    Annotated[Literal["none", "auto"], Tag("mode")] | Annotated[Named, Tag("named")],
    Discriminator(_legacy_choice),
]


class CalledFunction(Strict):
    """The function of an earlier call, its arguments as JSON text."""

    name: Annotated[str, StringConstraints(max_length=256)]
    arguments: str


class CalledCustom(Strict):
    """The custom tool of an earlier call, and what it was given."""

    name: Annotated[str, StringConstraints(max_length=256)]
    input: str


class FunctionCall(Strict):
    """A call in the history. Fields that only the chunks of a stream have may come back with it."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.FUNCTION_CALL

    id: Annotated[str, StringConstraints(max_length=256)]
    type: FunctionKind = "function"
    function: CalledFunction
    index: int | None = None


class CustomCall(Strict):
    """A call of a custom tool in the history."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.CUSTOM_CALL

    id: Annotated[str, StringConstraints(max_length=256)]
    type: Literal["custom"]
    custom: CalledCustom
    index: int | None = None


ToolCall = Annotated[
    Annotated[FunctionCall, Tag("a_function")] | Annotated[CustomCall, Tag("a_custom")], Discriminator(kind_of)
]
