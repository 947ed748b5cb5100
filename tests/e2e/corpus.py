"""Two hundred JSON schemas: every keyword alone, then objects, arrays and unions."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
SIZE = 200

_STRINGS: list[Schema] = [
    {"type": "string", "maxLength": 12},
    {"type": "string", "minLength": 3, "maxLength": 8},
    {"type": "string", "pattern": "^[a-z]{2,6}$"},
    {"type": "string", "pattern": "^(red|green|blue)-[0-9]{1,3}$"},
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email")),
    {"type": "string", "format": "uri"},
    {"type": "string", "format": "hostname"},
    {"type": "string", "format": "no-such-format", "maxLength": 8},
    {"type": "string", "enum": ["yes", "no", "maybe"]},
    {"const": "fixed"},
]
_NUMBERS: list[Schema] = [
    {"type": "integer", "minimum": 0, "maximum": 9},
    {"type": "integer", "minimum": -100, "maximum": 1000},
    {"type": "integer", "exclusiveMinimum": 4, "exclusiveMaximum": 7},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 10},
    {"enum": [1, 2, 3]},
    {"const": 42},
]
_PLAIN: list[Schema] = [{"type": "boolean"}, {"type": "null"}, {"enum": [None, True, "x", 3]}]
LEAVES = [*_STRINGS, *_NUMBERS, *_PLAIN]

_DEEP: list[Schema] = [
    {
        "$defs": {
            "node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
        },
        "$ref": "#/$defs/node",
    },
    {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/b"}},
        "required": ["a"],
        "$defs": {"b": {"type": "boolean"}},
    },
    {"type": ["boolean", "null"]},
    {"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 5}]},
    {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 3}, {"type": "boolean"}]},
    {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 9}]},
    {"not": {"type": "string"}},
    {"type": "integer", "not": {"const": 3}},
    {"if": {"type": "integer"}, "then": {"minimum": 5}, "else": {"type": "boolean"}},
    {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
    {"type": "array", "items": {"type": "boolean"}, "contains": {"const": True}, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "x"}], "items": False, "minItems": 2},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "maxProperties": 1},
    {"type": "object", "patternProperties": {"^n_": {"type": "boolean"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["b"], "additionalProperties": False},
    {"type": "object", "additionalProperties": False},
    {"type": "no-such-type"},
    {"type": "integer", "minimum": 5, "maximum": 4},
    {"$ref": "#/$defs/nowhere"},
    {"$ref": "https://example.com/schema.json"},
    {"type": "string", "pattern": "(["},
    {"enum": []},
]


def corpus() -> list[Schema]:
    """The schemas, the same at every call."""
    draw = random.Random(7)
    schemas = [*LEAVES, *_DEEP]
    while len(schemas) < SIZE:
        schemas.append(_grown(draw, depth=draw.randint(1, 3)))
    return schemas


def _grown(draw: random.Random, depth: int) -> Schema:
    if depth == 0:
        return draw.choice(LEAVES)
    match draw.randrange(4):
        case 0:
            return {"type": "array", "items": _grown(draw, depth - 1), "minItems": draw.randint(0, 1), "maxItems": 2}
        case 1:
            return {"anyOf": [_grown(draw, depth - 1), _grown(draw, depth - 1)]}
        case _:
            names = [f"{letter}{depth}" for letter in "abc"[: draw.randint(1, 3)]]
            return {
                "type": "object",
                "properties": {name: _grown(draw, depth - 1) for name in names},
                "required": names[: draw.randint(1, len(names))],
                "additionalProperties": False,
            }
