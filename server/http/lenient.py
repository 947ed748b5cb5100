"""Hints, and with --lenient all unsupported fields, are left out and listed in the answer's warnings."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.http.parsing import StrictRequest, StrictRoute
from server.http.validation import field_error
from server.schemas.content import IgnoredFields

# Routes with `warnings` in their answers; on other routes an unsupported field stays an error.
WARNING_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/api/chat", "/api/generate"})
MAX_WARNINGS = 32

Step = int | str


class WarningRequest(StrictRequest):
    """A request that leaves hints out of its body."""

    lenient = False

    def parse_body(self, body: bytes) -> object:
        """The validated body; the left-out fields become the request's warnings."""
        parsed, context = self.load(body), IgnoredFields(self.lenient)
        value = self.validate(parsed, context)
        self.state.warnings = list(left_out_warnings(parsed, context))
        return value


class LenientRequest(WarningRequest):
    """A request that leaves all unsupported fields out of its body."""

    lenient = True


class WarningRoute(StrictRoute):
    """A route that leaves out hints if its answer has warnings."""

    request_class: type[WarningRequest] = WarningRequest

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As `StrictRoute`."""
        return self.handler(self.request_class) if self.path in WARNING_PATHS else super().get_route_handler()


class LenientRoute(WarningRoute):
    """A route that leaves out unsupported fields."""

    request_class = LenientRequest


def warnings(request: Request) -> tuple[str, ...]:
    """The warnings of this request's body."""
    return tuple(getattr(request.state, "warnings", ()))


def left_out_warnings(body: object, context: IgnoredFields) -> Iterator[str]:
    """A warning for each field of the body that was left out, up to MAX_WARNINGS."""
    fields = context.left_out[:MAX_WARNINGS]
    paths = _paths_of(body, {id(holder) for holder, _, _ in fields}) if fields else {}
    for holder, name, reason in fields:
        # A copy made by a validator has another identity, and its path is unknown.
        path = ("body", *paths.get(id(holder), ()), name)
        error = field_error({"type": "extra_forbidden", "loc": path}, body)
        yield f"'{error.param}' has no effect: {reason}." if reason else error.message


def _paths_of(body: object, identities: set[int]) -> dict[int, tuple[Step, ...]]:
    """The paths of objects in a body, by their identities."""
    paths: dict[int, tuple[Step, ...]] = {}
    pending: list[tuple[object, tuple[Step, ...]]] = [(body, ())]
    while pending and len(paths) < len(identities):
        value, path = pending.pop()
        if id(value) in identities:
            paths[id(value)] = path
        inner: Sequence[tuple[Step, object]] = ()
        if isinstance(value, dict):
            inner = list(value.items())
        elif isinstance(value, list):
            inner = list(enumerate(value))
        pending.extend((item, (*path, step)) for step, item in inner if isinstance(item, dict | list))
    return paths
