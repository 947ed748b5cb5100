"""CORS: the origins whose pages may call this server from a browser."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from server.http.errors import ORIGIN_NOT_ALLOWED, ApiError, error_response

METHODS = ("GET", "HEAD", "POST", "DELETE")
# Response headers that pages may read only if the server exposes them.
EXPOSED_HEADERS = ("x-request-id", "retry-after", "x-should-retry")


class OriginsMiddleware(CORSMiddleware):
    """The outermost layer, so that allowed pages can read every response, errors included.

    Requests still need an API key: browsers do not add it by themselves, unlike cookies.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=METHODS,
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=EXPOSED_HEADERS,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """The response to a preflight request; an error for an origin that is not allowed."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        return error_response(ApiError(ORIGIN_NOT_ALLOWED, "This origin is not allowed; see --allowed-host."), "")
