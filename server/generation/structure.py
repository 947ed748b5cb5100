"""Constraint of an answer (structured output), by the names of OpenAI, vLLM, SGLang and llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from engine.chat_format.message import AnswerConstraint
from server.http.errors import invalid_value, missing_parameter
from server.http.parsing import StrictJsonError, parse
from server.schemas.common import Generation
from server.schemas.structure import JsonObjectFormat, JsonSchemaFormat, NamedSchema, StructuredOutputs
from server.schemas.tools import Schema

# Fields with a constraint.
STRUCTURES = frozenset(
    {
        "response_format",
        "structured_outputs",
        "guided_json",
        "json_schema",
        "guided_regex",
        "regex",
        "guided_choice",
        "guided_grammar",
        "grammar",
        "ebnf",
    }
)


def structure(body: Generation) -> tuple[str, AnswerConstraint] | None:
    """The field with a constraint, and the constraint; ApiError if there are two."""
    constraints = [(field, constraint) for field, constraint in _constraints(body) if constraint is not None]
    if len(constraints) > 1:
        (first, _), (second, _) = constraints[:2]
        raise invalid_value(second, f"an answer has at most one constraint, and '{first}' is set")
    return constraints[0] if constraints else None


def _constraints(body: Generation) -> Iterator[tuple[str, AnswerConstraint | None]]:
    yield _format(body)
    yield from _structured(body.structured_outputs or StructuredOutputs())
    yield "guided_json", _schema("guided_json", body.guided_json)
    yield "json_schema", _schema("json_schema", body.json_schema)
    yield "guided_regex", _regex(body.guided_regex)
    yield "regex", _regex(body.regex)
    yield "guided_choice", _choices(body.guided_choice)
    yield "guided_grammar", _grammar(body.guided_grammar)
    yield "grammar", _grammar(body.grammar)
    yield "ebnf", _grammar(body.ebnf)


def _format(body: Generation) -> tuple[str, AnswerConstraint | None]:
    match body.response_format:
        case JsonSchemaFormat(json_schema=None, schema_=None):
            raise missing_parameter("response_format.json_schema")
        case JsonSchemaFormat(json_schema=None, schema_=schema):
            return "response_format", _schema("response_format.schema", schema)
        case JsonSchemaFormat(schema_=dict()):
            raise invalid_value("response_format.schema", "'json_schema' has the schema already; give one of them")
        case JsonSchemaFormat(json_schema=NamedSchema() as named):
            # A name without schema means any JSON object, as in OpenAI's API.
            place = "response_format.json_schema.schema"
            constraint = _schema(place, named.schema_) or AnswerConstraint("json_object")
            return place, replace(constraint, strict=named.strict is not False)
        case JsonObjectFormat(schema_=schema):
            return "response_format", _schema("response_format.schema", schema) or AnswerConstraint("json_object")
        case _:
            return "response_format", None


def _structured(outputs: StructuredOutputs) -> Iterator[tuple[str, AnswerConstraint | None]]:
    yield "structured_outputs.json", _schema("structured_outputs.json", outputs.json_)
    yield "structured_outputs.regex", _regex(outputs.regex)
    yield "structured_outputs.choice", _choices(outputs.choice)
    yield "structured_outputs.grammar", _grammar(outputs.grammar)
    yield "structured_outputs.json_object", AnswerConstraint("json_object") if outputs.json_object else None


def _schema(field: str, schema: Schema | str | None) -> AnswerConstraint | None:
    if schema is None:
        return None
    if isinstance(schema, str):
        schema = _parsed(field, schema)
    return AnswerConstraint("json_schema", json.dumps(schema, ensure_ascii=False))


def _parsed(field: str, text: str) -> Schema:
    try:
        schema = parse(text)
    except StrictJsonError as error:
        raise invalid_value(field, f"it is not strict JSON: {error}") from error
    if not isinstance(schema, dict):
        raise invalid_value(field, "it is not a JSON object")
    return schema


def _regex(text: str | None) -> AnswerConstraint | None:
    return None if text is None else AnswerConstraint("regex", text)


def _grammar(text: str | None) -> AnswerConstraint | None:
    return None if text is None else AnswerConstraint("grammar", text)


def _choices(choices: list[str] | None) -> AnswerConstraint | None:
    return None if choices is None else AnswerConstraint("choices", choices=tuple(choices))
