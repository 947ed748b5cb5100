"""Pydantic's validation errors as API errors: the path in the JSON body and the reason. No message contains input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from server.http.errors import (
    IMAGE_TOO_LARGE,
    INVALID_BASE64_IMAGE,
    INVALID_IMAGE_URL,
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
# Kinds of errors by the types that validators give them; of all others INVALID_VALUE.
KINDS = {kind.code: kind for kind in (UNSUPPORTED_VALUE, INVALID_BASE64_IMAGE, INVALID_IMAGE_URL, IMAGE_TOO_LARGE)}
EXPECTED = "Input should be "


def install(app: FastAPI) -> None:
    """Add the exception handler of FastAPI's validation errors."""
    app.add_exception_handler(RequestValidationError, _on_validation)


def first_error(errors: Sequence[ErrorDetails], body: object) -> ApiError:
    """The first invalid field as an error. Of the errors of a union's members, the most specific ones are reported."""
    first = errors[0]
    path = _path(first, body)
    of_field = [error for error in errors if (_path(error, body) or "").startswith(path or "")]
    specific = [error for error in of_field if not error["type"].endswith("_type") or _path(error, body) != path]
    if specific:
        return field_error(specific[0], body)
    kinds = dict.fromkeys(_reason(error).removeprefix(EXPECTED) for error in of_field)
    return _invalid_value(path, first["type"], EXPECTED + " or ".join(kinds))


def field_error(error: ErrorDetails, body: object) -> ApiError:
    """One validation error as an API error."""
    path = _path(error, body)
    match error["type"]:
        case "missing":
            return ApiError(INVALID_VALUE, "The request needs a body.") if path is None else missing_parameter(path)
        case "union_tag_not_found":
            tag = error["ctx"]["discriminator"].strip("'")
            return missing_parameter(f"{path}.{tag}" if path else tag)
        case "extra_forbidden":
            return _extra_field(str(error["loc"][-1]), path)
        case kind:
            return _invalid_value(path, kind, _reason(error))


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(first_error(error.errors(), error.body), request.scope["path"])


def _reason(error: ErrorDetails) -> str:
    if error["type"] == "union_tag_invalid":
        return f"its {error['ctx']['discriminator']} should be one of {error['ctx']['expected_tags']}"
    if error["type"] == "model_type":
        # pydantic's message has the name of the class.
        return f"{EXPECTED}a valid object"
    reason: str = error["msg"]
    for python, json in JSON_WORDS.items():
        reason = reason.replace(python, json)
    return reason


def _extra_field(name: str, path: str | None) -> ApiError:
    if name in DOCUMENTED:
        return ApiError(UNSUPPORTED_PARAMETER, f"This server does not support '{path}' yet.", param=path)
    return ApiError(UNKNOWN_PARAMETER, f"Unknown parameter: '{path}'.", param=path)


def _invalid_value(path: str | None, fault_type: str, reason: str) -> ApiError:
    kind = KINDS.get(fault_type, INVALID_VALUE)
    subject = "body" if path is None else f"value for '{path}'"
    return ApiError(kind, f"Invalid {subject}: {reason}.", param=path)


def _path(error: ErrorDetails, body: object) -> str | None:
    """A path like `messages[2].content`, without pydantic's names of union members and marks of keys."""
    where, *location = error["loc"]
    if where != "body":
        return str(location[0])[:64]
    path = ""
    steps = [step for step in location if step != "[key]"]
    for index, step in enumerate(steps):
        missing_here = index == len(steps) - 1 and error["type"] == "missing"
        if isinstance(step, int) and isinstance(body, list):
            path += f"[{step}]"
            body = body[step] if step < len(body) else None
        elif isinstance(step, str) and isinstance(body, Mapping) and (step in body or missing_here):
            path += f".{step[:64]}" if path else step[:64]
            body = body.get(step)
    return path or None
