"""Structured output, by the parameters of OpenAI, vLLM, SGLang and llama.cpp."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag
from pydantic_core import PydanticCustomError

from server.schemas.content import Strict, one_of
from server.schemas.tools import Schema

FormatName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
# Larger ones take longer to compile than most answers take to generate.
Grammar = Annotated[str, StringConstraints(min_length=1, max_length=65536)]
Regex = Annotated[str, StringConstraints(min_length=1, max_length=16384)]
Choices = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=4096)]], Field(min_length=1, max_length=1024)
]
# A schema, or its JSON text.
SchemaOrText = Annotated[
    Annotated[str, Tag("text")] | Annotated[Schema, Tag("object")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "object"),
]

KNOWN_FORMATS = ("text", "json_object", "json_schema")


def _known(kind: object) -> object:
    if kind in ("structural_tag", "grammar", "regex", "json"):
        raise PydanticCustomError("unsupported_value", "it must be 'text', 'json_object' or 'json_schema'")
    return kind


class TextFormat(Strict):
    """Unconstrained text."""

    type: Annotated[Literal["text"], one_of(*KNOWN_FORMATS), BeforeValidator(_known)]


class JsonObjectFormat(Strict):
    """A JSON object; `schema` is llama.cpp's extension."""

    type: Literal["json_object"]
    schema_: Annotated[Schema | None, Field(alias="schema")] = None


class NamedSchema(Strict):
    """A schema. It is enforced exactly or refused; with `strict` false, unsupported keywords are ignored.

    Ignored keywords are reported in the response's `warnings`.
    """

    name: FormatName | None = None
    description: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    """JSON that follows a schema; `schema` in place of `json_schema` is llama.cpp's form."""

    type: Literal["json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None


def _format(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) and kind in KNOWN_FORMATS else "text"


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("text")]
    | Annotated[JsonObjectFormat, Tag("json_object")]
    | Annotated[JsonSchemaFormat, Tag("json_schema")],
    Discriminator(_format),
]


class StructuredOutputs(Strict):
    """vLLM's parameter for all kinds of constraints; exactly one is given."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None
