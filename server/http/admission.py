"""Admission before the body is received: a refusal costs a small part of what a rendered and tokenized request costs.

From its whole body until the engine opens it, an admitted request counts as waiting: otherwise all requests that arrive
while one is rendered and tokenized would be rendered and tokenized as well, and then refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import EngineError, Overloaded
from server.http.auth import caller
from server.http.errors import error_response, from_engine_error

# Routes of which every valid request is opened in the engine. Not Ollama's chats: without a prompt they load the model.
GENERATION_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/completion",
        "/infill",
        "/v1/responses",
        "/v1/responses/compact",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/decisions",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/api/embed",
        "/api/embeddings",
    }
)

# What the current request holds in the queue before the engine opens it. Tasks of the request inherit it.
_reservation: ContextVar[ExitStack | None] = ContextVar("reservation", default=None)


class AdmissionMiddleware:
    """ASGI middleware: answers 429 to requests for a generation while the queue is full for their owner."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self.app = app
        self._routes = {route.path: route for route in routes if isinstance(route, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it without its body."""
        path = scope.get("path", "")
        if scope["type"] == "http" and scope["method"] == "POST" and path in GENERATION_PATHS:
            connection = HTTPConnection(scope)
            try:
                check_admission(connection)
            except EngineError as error:
                # For the access log and metrics: the request does not reach its route.
                scope["route"] = self._routes[path]
                if isinstance(error, Overloaded):
                    caller().count_refusal("queue_full")
                await error_response(from_engine_error(error, path), path)(scope, receive, send)
                return
            with _reservation_scope() as reservation:
                await self.app(scope, _reserving(receive, connection, reservation), send)
            return
        await self.app(scope, receive, send)


def check_admission(connection: HTTPConnection) -> None:
    """Raise Overloaded if the queue is full for the caller."""
    connection.app.state.models.check_admission(caller().owner)


@contextmanager
def admitted(connection: HTTPConnection) -> Iterator[None]:
    """Count the request as waiting until the engine opens it, or the block ends; Overloaded if the queue is full."""
    check_admission(connection)
    with _reservation_scope() as reservation:
        reservation.enter_context(connection.app.state.models.reserve(caller().owner))
        yield


def release_reservation() -> None:
    """The engine is about to open the current request, and counts it itself from now on."""
    if (reservation := _reservation.get()) is not None:
        reservation.close()


@contextmanager
def _reservation_scope() -> Iterator[ExitStack]:
    with ExitStack() as reservation:
        token = _reservation.set(reservation)
        try:
            yield reservation
        finally:
            _reservation.reset(token)


def _reserving(receive: Receive, connection: HTTPConnection, reservation: ExitStack) -> Receive:
    """Reserves at the end of the body: slow uploads must not fill the queue."""

    async def receive_and_reserve() -> Message:
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            reservation.enter_context(connection.app.state.models.reserve(caller().owner))
        return message

    return receive_and_reserve
