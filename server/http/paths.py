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

    def normalise(self, scope: Scope) -> Scope:
        """The scope of the route for a request: with /v1, without a slash at the end, GET for HEAD without a route.

        The HTTP server leaves out the body of a response to HEAD. Paths change in the scope itself.
        """
        self._remove_slash(scope)
        self._add_prefix(scope)
        if scope.get("method") == "HEAD" and not self.serves(scope):
            got = {**scope, "method": "GET"}
            return got if self.serves(got) else scope
        return scope

    def _remove_slash(self, scope: Scope) -> None:
        if len(scope["path"]) > 1 and scope["path"].endswith("/") and not scope["path"].endswith("//"):
            scope["raw_path"] = scope.get("raw_path", scope["path"].encode()).removesuffix(b"/")
            scope["path"] = scope["path"].removesuffix("/")

    def _add_prefix(self, scope: Scope) -> None:
        path: str = scope["path"]
        if path[1:].partition("/")[0] in self._without_prefix:
            scope["path"] = PREFIX + path
            scope["raw_path"] = PREFIX.encode() + scope.get("raw_path", path.encode())

    def serves(self, scope: Scope) -> bool:
        """Whether a route has this path and method."""
        return any(route.matches(scope)[0] is Match.FULL for route in self._routes)
