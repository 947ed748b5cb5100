"""What a JSON schema says about types, for formats that write values in their own way."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping

from llguidance import LLMatcher

from engine.chat_format.lark_writer import ANYTHING
from engine.chat_format.message import Tool

Schema = Mapping[str, object]

_OF_PYTHON: dict[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
# Whatever this file does not know is followed so many times at most, or a schema could lead in a circle.
_MAX_DEPTH = 16
# Choices inside choices are looked at together: a few that lead back to themselves would be millions.
_MAX_CHOICES = 512


def schema_of(tool: Tool) -> Schema:
    """The schema of a tool's arguments; of a tool that is not strict, as far as it can be kept."""
    schema = json.loads(tool.parameters)
    return as_schema(schema if tool.strict else loosened(schema))


def loosened(value: object) -> object:
    """A schema without the expressions that llguidance cannot follow, such as lookaround."""
    if isinstance(value, list):
        return [loosened(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: part for key, part in value.items() if key != "pattern" or not isinstance(part, str) or _regular(part)}
    if isinstance(parts := kept.get("patternProperties"), dict):
        kept["patternProperties"] = {key: part for key, part in parts.items() if _regular(key)}
    return {key: loosened(part) for key, part in kept.items()}


def _regular(expression: str) -> bool:
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(expression))


def as_schema(value: object) -> Schema:
    """A part of a schema; one that says nothing where it is none, such as `true`."""
    return value if isinstance(value, dict) else {}


def properties_of(schema: Schema, root: Schema) -> dict[str, Schema]:
    """The members of an object, what they refer to in their place; required ones that nothing describes too."""
    described = as_schema(schema.get("properties"))
    required: dict[str, object] = {name: {} for name in required_of(schema) if name not in described}
    return {name: resolved(as_schema(part), root) for name, part in {**described, **required}.items()}


def required_of(schema: Schema) -> list[str]:
    """The members that an object must have."""
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def resolved(schema: Schema, root: Schema) -> Schema:
    """The schema that is meant where one refers to another part of the whole."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        target: object = root
        for part in reference[1:].split("/")[1:]:
            target = as_schema(target).get(part.replace("~1", "/").replace("~0", "~"))
        schema = {**as_schema(target), **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def types_of(schema: Schema, root: Schema) -> frozenset[str]:
    """The types that a value may have, as far as they are told; none: any."""
    found, parts = set[str](), deque([schema])
    for _ in range(_MAX_CHOICES):
        if not parts:
            return frozenset(found)
        part = resolved(parts.popleft(), root)
        choices = part.get("anyOf", part.get("oneOf"))
        told = _declared_types(part)
        if not told and isinstance(choices, list) and choices:
            parts.extend(as_schema(choice) for choice in choices)
        elif not told:
            return frozenset()
        found |= told
    return frozenset()


def _declared_types(schema: Schema) -> frozenset[str]:
    """The types that a schema names, or that its only values have."""
    told = schema.get("type")
    if isinstance(told, str):
        return frozenset((told,))
    if isinstance(told, list):
        return frozenset(name for name in told if isinstance(name, str))
    return frozenset(name for value in values_of(schema) for name in _OF_PYTHON[type(value)])


def defined_in(root: Schema) -> dict[str, object]:
    """What parts of a schema may refer to."""
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def values_of(schema: Schema) -> list[object]:
    """The only values that there may be; none: others too."""
    values = schema.get("enum")
    if isinstance(values, list):
        return values
    return [schema["const"]] if "const" in schema else []


def patterns_of(schema: Schema) -> tuple[str, ...]:
    """Regular expressions that a string must follow, all of them."""
    least, most, pattern = schema.get("minLength"), schema.get("maxLength"), schema.get("pattern")
    bounds = f"(?s:.){{{least or 0},{'' if most is None else most}}}"
    found = [ANYTHING] if least is None and most is None else [bounds]
    if isinstance(pattern, str):
        before = "" if pattern.startswith("^") else ANYTHING
        behind = "" if pattern.endswith("$") else ANYTHING
        found.append(f"{before}({pattern.removeprefix('^').removesuffix('$')}){behind}")
    return tuple(found)


def json_of(text: str, types: frozenset[str]) -> str:
    """A value that a model wrote bare, as JSON of one of these types if it is that, else as a string."""
    text = text.strip()
    text = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    try:
        value = json.loads(text, parse_constant=_reject)
    except (ValueError, RecursionError):
        value = text
        text = json.dumps(text, ensure_ascii=False)
    if types and not types.intersection(_OF_PYTHON[type(value)]) and "string" in types:
        return json.dumps(text, ensure_ascii=False)
    return text


def _reject(name: str) -> object:
    raise ValueError(name)
