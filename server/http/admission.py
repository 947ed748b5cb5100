"""Admission before the body is received: a refusal costs a small part of what a rendered and tokenized request costs.

The engine checks again when it opens the request, since the queue may fill up in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import EngineError
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


class AdmissionMiddleware:
    """ASGI middleware: answers 429 to requests for a generation while the queue is full for their owner."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self.app = app
        self._routes = {route.path: route for route in routes if isinstance(route, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it without its body."""
        path = scope.get("path", "")
        if scope["type"] == "http" and scope["method"] == "POST" and path in GENERATION_PATHS:
            try:
                check_admission(HTTPConnection(scope))
            except EngineError as error:
                # For the access log and metrics: the request does not reach its route.
                scope["route"] = self._routes[path]
                await error_response(from_engine_error(error, path), path)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def check_admission(connection: HTTPConnection) -> None:
    """Raise Overloaded if the queue is full for the caller."""
    connection.app.state.models.check_admission(caller().owner)
