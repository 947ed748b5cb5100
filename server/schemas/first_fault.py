"""Fail-fast validation: one error for lists, objects and unknown fields of any length."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pydantic import AliasChoices, BaseModel
from pydantic_core import PydanticKnownError, core_schema


def fail_fast(schema: Any) -> None:
    """Make lists and objects anywhere in a schema fail at their first error, in place."""
    match schema:
        case {"type": "function-before", "schema": {"type": "dict"}}:
            return
        case {"type": "list"}:
            schema["fail_fast"] = True
        case {"type": "dict", "max_length": max_size}:
            checked = core_schema.no_info_before_validator_function(_size_check(max_size), schema.copy())
            schema.clear()
            schema.update(checked)
            return
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        if isinstance(inner, dict | list):
            fail_fast(inner)


@functools.cache
def field_names(model: type[BaseModel]) -> frozenset[str]:
    """JSON names of a model's fields."""
    names: set[str] = set()
    for name, info in model.model_fields.items():
        match info.validation_alias:
            case AliasChoices(choices=choices):
                names.update(choice for choice in choices if isinstance(choice, str))
            case str() as alias:
                names.add(alias)
            case _:
                names.add(name)
    return frozenset(names)


def _size_check(max_size: int) -> Callable[[Any], Any]:
    """pydantic checks the size of an object only after all of its values."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > max_size:
            limit = {"field_type": "Dictionary", "max_length": max_size, "actual_length": None}
            raise PydanticKnownError("too_long", limit)
        return value

    return check
