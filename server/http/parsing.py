"""Strict JSON, parsed before pydantic validates it.

Python's parser accepts NaN, turns 1e999 into infinity, keeps the last of two equal keys, guesses UTF-16 and recurses to
any depth. Each has been a vulnerability of some server; here each is an error with code invalid_json.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, ParamSpec, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi.routing import APIRoute
from fastapi.utils import create_model_field
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from server.http.errors import INVALID_JSON, INVALID_VALUE, ApiError, body_too_large
from server.http.json_limits import exceeded_limit
from server.http.long_strings import put_back, take_long_strings
from server.http.validation import first_error
from server.schemas.media import inline_characters

MAX_INTEGER_DIGITS = 19
# Larger bodies are parsed, validated and translated in a worker thread.
LARGE_BODY_BYTES = 16 * 1024
# The pieces of larger bodies are joined in a worker thread: 60 MB take 30 ms.
JOINED_BYTES = 2**20
# The key of a request's state with the limit of its body without images and sounds.
TEXT_LIMIT = "text_limit"
# The key of a request's state with the object of its body, if middleware parsed it.
PARSED_BODY = "parsed_body"

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Model = TypeVar("Model", bound=BaseModel)

_surrogate = re.compile(r"\\u[dD][89a-fA-F]")


class StrictRequest(Request):
    """A request with strict JSON as its body: a valid `model`, or any object if `model` is None."""

    def __init__(self, http: Request, model: type[BaseModel] | None) -> None:
        super().__init__(http.scope, http.receive)
        self._model = model

    async def body(self) -> bytes:
        """The whole body."""
        if not hasattr(self, "_body"):
            self._body = await joined([piece async for piece in self.stream() if piece])
        return self._body

    async def json(self) -> Any:
        """The validated body, or ApiError. FastAPI accepts a validated model without a second validation."""
        body = await self.body()
        if not body:
            raise ApiError(INVALID_VALUE, "The request needs a body.")
        value = await self._parsed(body)
        limit = getattr(self.state, TEXT_LIMIT, len(body))
        if len(body) > limit and len(body) - inline_characters(value) > limit:
            raise body_too_large(limit)
        return value

    async def _parsed(self, body: bytes) -> object:
        if len(body) <= LARGE_BODY_BYTES:
            return self.parse_body(body)
        # One at a time: each holds the interpreter lock and takes several times the memory of its text.
        return await anyio.to_thread.run_sync(self.parse_body, body, limiter=self.app.state.large_bodies)

    def parse_body(self, body: bytes) -> object:
        """The validated body."""
        return self.validate(self.load(body))

    def load(self, body: bytes) -> dict[str, object]:
        """The JSON object of the body, which middleware may have parsed already."""
        # Removed, so that its memory does not last as long as the request.
        parsed: dict[str, object] | None = self.scope.get("state", {}).pop(PARSED_BODY, None)
        return loads(body) if parsed is None else parsed

    def validate(self, value: object, context: object = None) -> object:
        """The value as a model; ApiError for its first error."""
        return value if self._model is None else validated(self._model, value, context)


class StrictRoute(APIRoute):
    """A route that reads its body through `StrictRequest`.

    responses  as in FastAPI; only `create_response_fields` reads their types, for /openapi.json, since that takes most
               of the start-up time of an app
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

    def create_response_fields(self) -> None:
        """Create the response types for /openapi.json."""
        self.response_fields = {
            status: create_model_field(f"Response_{status}_{self.unique_id}", response["model"], mode="serialization")
            for status, response in self.responses.items()
            if "model" in response
        }

    @property
    def body_model(self) -> type[BaseModel] | None:
        """The model of the JSON body, if the endpoint has one."""
        annotation = None if self.body_field is None else self.body_field.field_info.annotation
        return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's documented hook for another request class."""
        return self.handler(StrictRequest)

    def handler(self, kind: type[StrictRequest]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """A handler that reads requests as `kind`. It calls an endpoint with no parameter but the body directly."""
        model, dependant, endpoint = self.body_model, self.dependant, self.endpoint
        others = (dependant.path_params, dependant.query_params, dependant.header_params, dependant.cookie_params)
        if model is None or any(others) or dependant.dependencies:
            return self._solved_handler(kind)
        body, http = dependant.body_params[0].name, dependant.request_param_name

        async def direct(request: Request) -> Response:
            strict_request = kind(request, model)
            values = {body: await strict_request.json(), **({} if http is None else {http: strict_request})}
            answer: Response = await endpoint(**values)
            return answer

        return direct

    def _solved_handler(self, kind: type[StrictRequest]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        solving, model = super().get_route_handler(), self.body_model

        async def solved(request: Request) -> Response:
            return await solving(kind(request, model))

        return solved


async def joined(pieces: Sequence[bytes]) -> bytes:
    """The pieces of a body as one; many bytes are copied in a worker thread, without the interpreter lock."""
    if len(pieces) == 1 or sum(map(len, pieces)) <= JOINED_BYTES:
        return b"".join(pieces)
    return await anyio.to_thread.run_sync(b"".join, pieces)


async def run_by_size(
    http: Request, work: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """The result of `work`, which runs in a worker thread if the request's body is large."""
    if len(await http.body()) <= LARGE_BODY_BYTES:
        return work(*args, **kwargs)
    return await anyio.to_thread.run_sync(lambda: work(*args, **kwargs))


def large_body_limiter() -> CapacityLimiter:
    """The limiter of concurrent worker threads for large bodies: one per app."""
    return CapacityLimiter(1)


def validated(model: type[Model], value: object, context: object = None) -> Model:
    """The value as a model; ApiError for its first error."""
    try:
        return model.model_validate(value, context=context)
    except ValidationError as error:
        errors = [{**details, "loc": ("body", *details["loc"])} for details in error.errors(include_url=False)]
        raise first_error(errors, value) from error


class StrictJsonError(ValueError):
    """The reason why a text is not strict JSON, with the position if the parser has one."""


def loads(body: bytes) -> dict[str, object]:
    """Parse the body of a request; ApiError if it is not a strict JSON object."""
    try:
        short, strings = take_long_strings(body)
        value = parse(_decode_short(short, body), strings)
    except StrictJsonError as error:
        raise ApiError(INVALID_JSON, f"We could not parse the JSON body of your request: {error}.") from error
    if not isinstance(value, dict):
        raise ApiError(INVALID_VALUE, "Invalid body: it must be a JSON object.")
    return value


def decode(body: bytes) -> str:
    """The text; StrictJsonError if it is not UTF-8 or has a byte order mark."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(f"not UTF-8 at byte {error.start}")
    if text.startswith("\ufeff"):
        _refuse("it starts with a byte order mark")
    return text


def _decode_short(short: bytes, body: bytes) -> str:
    """The text of a body without its long strings; errors name positions in the whole body."""
    try:
        return decode(short)
    except StrictJsonError:
        return decode(body)


def parse(text: str, strings: Mapping[str, str] = MappingProxyType({})) -> object:
    """Parse any JSON value, with strings in place of their placeholders; StrictJsonError if it is not strict JSON."""
    excess = exceeded_limit(text)
    if excess:
        _refuse(excess)
    try:
        value: object = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_integer,
        )
    except json.JSONDecodeError as error:
        # Placeholders are shorter than their strings, so the position would be another one.
        _refuse(error.msg if strings else f"{error.msg} (line {error.lineno}, column {error.colno})")
    if _surrogate.search(text):
        _check_surrogates(value)
    return put_back(value, strings) if strings else value


def _refuse(reason: str) -> NoReturn:
    raise StrictJsonError(reason)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        _refuse(f"the key '{_duplicate_key(pairs)[:64]}' is duplicate")
    return value


def _duplicate_key(pairs: list[tuple[str, object]]) -> str:
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
    if len(digits.lstrip("-")) > MAX_INTEGER_DIGITS:
        _refuse(f"an integer has more than {MAX_INTEGER_DIGITS} digits")
    return int(digits)


def _check_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        _refuse("a string contains an unpaired surrogate")
