"""Tools as requests hold them: what may be called, what must be, and what was called before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag
from pydantic_core import PydanticCustomError

from server.schemas import policy
from server.schemas.content import Strict

# OpenAI's letters and length, and the dots that servers of tools (MCP) put between their name and the tool's.
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
# A JSON schema. What it means is read where it becomes a grammar.
Schema = dict[str, object]

MOST_TOOLS = 256


def _only_functions(kind: object) -> object:
    if kind == "custom":
        raise PydanticCustomError("unsupported_value", "this server calls functions only, no custom tools")
    return kind


FunctionKind = Annotated[Literal["function"], BeforeValidator(_only_functions)]


class FunctionDefinition(Strict):
    """A function that may be called. Without `parameters` it takes none."""

    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class ToolDefinition(Strict):
    """A tool that may be called."""

    type: FunctionKind
    function: FunctionDefinition


class LegacyFunction(Strict):
    """A function under the name that OpenAI gave its tools first."""

    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None


class FunctionNamed(Strict):
    """A function by its name."""

    name: FunctionName


class NamedChoice(Strict):
    """This tool must be called."""

    type: FunctionKind
    function: FunctionNamed


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
    return "allowed" if value.get("type") == "allowed_tools" else "named"


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedChoice, Tag("named")]
    | Annotated[AllowedChoice, Tag("allowed")],
    Discriminator(_choice),
]


def _legacy_choice(value: object) -> str:
    return "named" if isinstance(value, dict) else "mode"


LegacyChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("mode")] | Annotated[FunctionNamed, Tag("named")],
    Discriminator(_legacy_choice),
]


class CalledFunction(Strict):
    """The function of an earlier call, its arguments as JSON text."""

    name: Annotated[str, StringConstraints(max_length=256)]
    arguments: str


class ToolCall(Strict):
    """A call in the history. Fields that only the chunks of a stream have may come back with it."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.CALL

    id: Annotated[str, StringConstraints(max_length=256)]
    type: FunctionKind = "function"
    function: CalledFunction
    index: int | None = None
