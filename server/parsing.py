"""Strict JSON, before pydantic sees anything.

Python's parser takes NaN, turns 1e999 into infinity, keeps the last of two equal keys, guesses UTF-16 and recurses as
deep as the body says. Each of these has been a hole in some server, so each is refused here, as code invalid_json.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import anyio.to_thread
from fastapi.routing import APIRoute
from fastapi.utils import create_model_field
from starlette.requests import Request
from starlette.responses import Response

from server.errors import INVALID_JSON, INVALID_VALUE, ApiError

DEEPEST = 64
LONGEST_INTEGER = 19
# Larger bodies are parsed in a worker thread, so that the streams of others go on meanwhile.
LARGE_BODY_BYTES = 64 * 1024

# Possessive, and content with a string that never ends: linear whatever the text.
_marks = re.compile(r'"(?:[^"\\]+|\\.)*+"?|[\[\]{}]', re.DOTALL)
_surrogate = re.compile(r"\\u[dD][89a-fA-F]")


class StrictRequest(Request):
    """A request whose body must be strict JSON and an object."""

    async def json(self) -> Any:
        """The parsed body; ApiError if it is anything but one JSON object."""
        body = await self.body()
        if len(body) > LARGE_BODY_BYTES:
            return await anyio.to_thread.run_sync(loads, body)
        return loads(body)


class StrictRoute(APIRoute):
    """A route that reads its body through `StrictRequest`.

    responses  as FastAPI takes them, but that their types are looked at by `describe` alone: no request needs them, and
               they take far more time than all the rest of an app
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        responses: dict[int | str, dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(path, endpoint, **options)
        self.responses = responses or {}

    def describe(self) -> None:
        """Get ready for /openapi.json."""
        self.response_fields = {
            status: create_model_field(f"Response_{status}_{self.unique_id}", response["model"], mode="serialization")
            for status, response in self.responses.items()
            if "model" in response
        }

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's documented place to put another request class."""
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return strict


class NotStrict(ValueError):
    """Why a text is no strict JSON, and, where the parser knows it, the place."""


def loads(body: bytes) -> dict[str, object]:
    """Parse the body of a request; ApiError says what is wrong with it."""
    try:
        value = parse(_decode(body))
    except NotStrict as error:
        raise ApiError(INVALID_JSON, f"We could not parse the JSON body of your request: {error}.") from error
    if not isinstance(value, dict):
        raise ApiError(INVALID_VALUE, "Invalid body: it must be a JSON object.")
    return value


def parse(text: str) -> object:
    """Parse any JSON value; raises NotStrict."""
    _check_depth(text)
    try:
        value: object = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_integer,
        )
    except json.JSONDecodeError as error:
        _refuse(f"{error.msg} (line {error.lineno}, column {error.colno})")
    if _surrogate.search(text):
        _check_surrogates(value)
    return value


def _refuse(reason: str) -> NoReturn:
    raise NotStrict(reason)


def _decode(body: bytes) -> str:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(f"not UTF-8 at byte {error.start}")
    if text.startswith("\ufeff"):
        _refuse("it starts with a byte order mark")
    return text


def _check_depth(text: str) -> None:
    depth = 0
    for match in _marks.finditer(text):
        mark = match.group()
        if mark in "[{":
            depth += 1
            if depth > DEEPEST:
                _refuse(f"nested deeper than {DEEPEST} levels")
        elif mark in "]}":
            depth -= 1


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        _refuse(f"the key '{_twice(pairs)[:64]}' is there twice")
    return value


def _twice(pairs: list[tuple[str, object]]) -> str:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            break
        seen.add(name)
    return name


def _constant(name: str) -> NoReturn:
    _refuse(f"{name} is not a JSON number")


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        _refuse("a number is too large")
    return value


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > LONGEST_INTEGER:
        _refuse(f"an integer has more than {LONGEST_INTEGER} digits")
    return int(digits)


def _check_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        _refuse("a string holds half of a surrogate pair")
