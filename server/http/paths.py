"""The paths of the app, for the checks before a request reaches its route."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

PREFIX = "/v1"
# Requested every few seconds by monitoring.
PROBE_PATHS = frozenset({"/health", "/ready", "/metrics"})
# Paths with a WebSocket endpoint.
WEBSOCKET_PATHS = frozenset({"/v1/responses", "/responses"})


class ServedPaths:
    """Whether a path is served, and the prefix /v1 for clients with a base URL that lacks it."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._routes = routes
        segments = [route.path.split("/") for route in routes if isinstance(route, Route)]
        # A path that has its own route gets no prefix.
        self._without_prefix = {path[2] for path in segments if path[1] == PREFIX[1:]} - {path[1] for path in segments}

    def add_prefix(self, scope: Scope) -> None:
        """Put /v1 before the path of an OpenAI endpoint without it, in the scope itself."""
        path: str = scope["path"]
        if path[1:].partition("/")[0] in self._without_prefix:
            scope["path"] = PREFIX + path
            scope["raw_path"] = PREFIX.encode() + scope.get("raw_path", path.encode())

    def serves(self, scope: Scope) -> bool:
        """Whether a route has this path and method."""
        return any(route.matches(scope)[0] is Match.FULL for route in self._routes)
