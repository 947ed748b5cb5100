"""Types and constraints of a JSON schema, for chat formats with their own notation of values."""

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
# Limit of followed references: schemas may be circular.
_MAX_DEPTH = 16
# Limit of nested choices that are visited: recursive choices grow exponentially.
_MAX_CHOICES = 512


def schema_of(tool: Tool) -> Schema:
    """The schema of a tool's arguments; without `strict`, unsupported expressions are removed."""
    schema = json.loads(tool.parameters)
    return as_schema(schema if tool.strict else loosened(schema))


def loosened(value: object) -> object:
    """The schema without regular expressions that llguidance does not support, such as lookaround."""
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
    """A part of a schema; {} if it is no object, such as `true`."""
    return value if isinstance(value, dict) else {}


def properties_of(schema: Schema, root: Schema) -> dict[str, Schema]:
    """The members of an object, with references resolved; {} for required members without a description."""
    declared = as_schema(schema.get("properties"))
    required: dict[str, object] = {name: {} for name in required_of(schema) if name not in declared}
    return {name: resolved(as_schema(part), root) for name, part in {**declared, **required}.items()}


def required_of(schema: Schema) -> list[str]:
    """Names of required members."""
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def resolved(schema: Schema, root: Schema) -> Schema:
    """The schema with `$ref` replaced by its target in `root`."""
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
    """The JSON types that a value may have; empty: any."""
    types, parts = set[str](), deque([schema])
    for _ in range(_MAX_CHOICES):
        if not parts:
            return frozenset(types)
        part = resolved(parts.popleft(), root)
        choices = part.get("anyOf", part.get("oneOf"))
        declared = _declared_types(part)
        if not declared and isinstance(choices, list) and choices:
            parts.extend(as_schema(choice) for choice in choices)
        elif not declared:
            return frozenset()
        types |= declared
    return frozenset()


def _declared_types(schema: Schema) -> frozenset[str]:
    """Types by the `type` keyword, else by `enum` or `const`."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset((declared,))
    if isinstance(declared, list):
        return frozenset(name for name in declared if isinstance(name, str))
    return frozenset(name for value in values_of(schema) for name in _OF_PYTHON[type(value)])


def defined_in(root: Schema) -> dict[str, object]:
    """The definitions that references may point to."""
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def values_of(schema: Schema) -> list[object]:
    """The allowed values; empty: unrestricted."""
    values = schema.get("enum")
    if isinstance(values, list):
        return values
    return [schema["const"]] if "const" in schema else []


def patterns_of(schema: Schema) -> tuple[str, ...]:
    """Regular expressions that a string must match, all of them."""
    min_length, max_length, pattern = schema.get("minLength"), schema.get("maxLength"), schema.get("pattern")
    bounds = f"(?s:.){{{min_length or 0},{'' if max_length is None else max_length}}}"
    patterns = [ANYTHING] if min_length is None and max_length is None else [bounds]
    if isinstance(pattern, str):
        ahead = "" if pattern.startswith("^") else ANYTHING
        after = "" if pattern.endswith("$") else ANYTHING
        patterns.append(f"{ahead}({pattern.removeprefix('^').removesuffix('$')}){after}")
    return tuple(patterns)


def json_of(text: str, types: frozenset[str]) -> str:
    """A value without quotes as JSON of one of `types` if it is valid for them, else as a JSON string."""
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
