"""With --lenient, a field that is not honoured is left out and told in the answer, where it is else refused."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from server.faults import invalid_field
from server.parsing import StrictRequest, StrictRoute

# The routes whose answers have a list of warnings; the others refuse even so.
TELLING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
MOST_WARNINGS = 32

Step = int | str


class LenientRequest(StrictRequest):
    """A request whose body is read without some of its fields."""

    def leave_out(self, paths: Sequence[Sequence[Step]]) -> None:
        """From now on."""
        self._left_out = paths

    async def json(self) -> Any:
        """The parsed body, without them."""
        body = await super().json()
        for path in getattr(self, "_left_out", ()):
            _remove(body, path)
        return body


class LenientRoute(StrictRoute):
    """A route that tries again without the fields that nobody honours."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As for `StrictRoute`."""
        if self.path not in TELLING:
            return super().get_route_handler()
        handler = APIRoute.get_route_handler(self)

        async def lenient(request: Request) -> Response:
            reading = LenientRequest(request.scope, request.receive)
            try:
                return await handler(reading)
            except RequestValidationError as error:
                faults = error.errors()
                if any(fault["type"] != "extra_forbidden" for fault in faults):
                    raise
                told = [invalid_field(fault, error.body).message for fault in faults[:MOST_WARNINGS]]
                reading.state.warnings = told
                reading.leave_out([fault["loc"][1:] for fault in faults])
            return await handler(reading)

        return lenient


def warnings(request: Request) -> tuple[str, ...]:
    """What was left out of the body of this request, in words."""
    return tuple(getattr(request.state, "warnings", ()))


def _remove(body: Any, path: Sequence[Step]) -> None:
    # Locations of pydantic hold names of union members too, which are no keys of the body.
    *way, last = path
    for step in way:
        if (isinstance(step, int) and isinstance(body, list)) or (isinstance(body, dict) and step in body):
            body = body[step]  # type: ignore[index]
    if isinstance(body, dict):
        body.pop(last, None)
