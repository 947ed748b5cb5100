"""The URLs of the app, as they are known before anything of a request is read."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

PREFIX = "/v1"
# Where a connection may become a WebSocket.
WEBSOCKET_PATHS = frozenset({"/v1/responses", "/responses"})


class ServedPaths:
    """Whether a URL is served, and the full path where a client was given a base URL without /v1."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._routes = routes
        segments = [route.path.split("/") for route in routes if isinstance(route, Route)]
        # A path that is served as it is keeps its meaning.
        self._without_prefix = {path[2] for path in segments if path[1] == PREFIX[1:]} - {path[1] for path in segments}

    def add_prefix(self, scope: Scope) -> None:
        """Put /v1 before the path of an OpenAI endpoint that lacks it, in the scope itself."""
        path: str = scope["path"]
        if path[1:].partition("/")[0] in self._without_prefix:
            scope["path"] = PREFIX + path
            scope["raw_path"] = PREFIX.encode() + scope.get("raw_path", path.encode())

    def serves(self, scope: Scope) -> bool:
        """Whether a route takes this path with this method."""
        return any(route.matches(scope)[0] is Match.FULL for route in self._routes)
