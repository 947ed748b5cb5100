"""Pydantic's validation errors as API errors: the path in the JSON body and the reason. No message contains input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from server.http.errors import (
    INVALID_VALUE,
    UNKNOWN_PARAMETER,
    UNSUPPORTED_PARAMETER,
    UNSUPPORTED_VALUE,
    ApiError,
    error_response,
    missing_parameter,
)
from server.schemas.policy import DOCUMENTED

ErrorDetails = Mapping[str, Any]

# pydantic names Python's types; clients send JSON.
JSON_WORDS = {
    "dictionary or object to extract fields from": "object",
    "valid dictionary": "valid object",
    "Dictionary": "Object",
    " after validation": "",
}
EXPECTED = "Input should be "


def install(app: FastAPI) -> None:
    """Add the exception handler of FastAPI's validation errors."""
    app.add_exception_handler(RequestValidationError, _on_validation)


def first_error(faults: Sequence[ErrorDetails], body: object) -> ApiError:
    """The first invalid field as an error. Of the errors of a union's members, the most specific ones are reported."""
    first = faults[0]
    path = _path(first, body)
    of_field = [fault for fault in faults if (_path(fault, body) or "").startswith(path or "")]
    meant = [fault for fault in of_field if not fault["type"].endswith("_type") or _path(fault, body) != path]
    if meant:
        return field_error(meant[0], body)
    kinds = dict.fromkeys(_reason(fault).removeprefix(EXPECTED) for fault in of_field)
    return _invalid_value(path, first["type"], EXPECTED + " or ".join(kinds))


def field_error(fault: ErrorDetails, body: object) -> ApiError:
    """One validation error as an API error."""
    path = _path(fault, body)
    match fault["type"]:
        case "missing":
            return ApiError(INVALID_VALUE, "The request needs a body.") if path is None else missing_parameter(path)
        case "union_tag_not_found":
            tag = fault["ctx"]["discriminator"].strip("'")
            return missing_parameter(f"{path}.{tag}" if path else tag)
        case "extra_forbidden":
            return _extra_field(str(fault["loc"][-1]), path)
        case kind:
            return _invalid_value(path, kind, _reason(fault))


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(first_error(error.errors(), error.body), request.scope["path"])


def _reason(fault: ErrorDetails) -> str:
    if fault["type"] == "union_tag_invalid":
        return f"its {fault['ctx']['discriminator']} should be one of {fault['ctx']['expected_tags']}"
    if fault["type"] == "model_type":
        # pydantic's message has the name of the class.
        return f"{EXPECTED}a valid object"
    reason: str = fault["msg"]
    for python, json in JSON_WORDS.items():
        reason = reason.replace(python, json)
    return reason


def _extra_field(name: str, path: str | None) -> ApiError:
    if name in DOCUMENTED:
        return ApiError(UNSUPPORTED_PARAMETER, f"This server does not support '{path}' yet.", param=path)
    return ApiError(UNKNOWN_PARAMETER, f"Unknown parameter: '{path}'.", param=path)


def _invalid_value(path: str | None, fault_type: str, reason: str) -> ApiError:
    kind = UNSUPPORTED_VALUE if fault_type == UNSUPPORTED_VALUE.code else INVALID_VALUE
    what = "body" if path is None else f"value for '{path}'"
    return ApiError(kind, f"Invalid {what}: {reason}.", param=path)


def _path(fault: ErrorDetails, body: object) -> str | None:
    """A path like `messages[2].content`, without pydantic's names of union members and marks of keys."""
    where, *location = fault["loc"]
    if where != "body":
        return str(location[0])[:64]
    path = ""
    steps = [step for step in location if step != "[key]"]
    for place, step in enumerate(steps):
        missing_here = place == len(steps) - 1 and fault["type"] == "missing"
        if isinstance(step, int) and isinstance(body, list):
            path += f"[{step}]"
            body = body[step] if step < len(body) else None
        elif isinstance(step, str) and isinstance(body, dict) and (step in body or missing_here):
            path += f".{step[:64]}" if path else step[:64]
            body = body.get(step)
    return path or None
