"""Pages of other sites: which of them may call this server from a browser (CORS)."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from server.http.errors import ORIGIN_NOT_ALLOWED, ApiError, error_response

METHODS = ("GET", "HEAD", "POST", "DELETE")
# Of those that a page may not read unless told so.
EXPOSED_HEADERS = ("x-request-id", "retry-after", "x-should-retry")


class OriginsMiddleware(CORSMiddleware):
    """Outside of all other layers, so that pages of these origins read every answer, errors too.

    Keys are asked for as ever: they come in headers, which a browser adds for no page by itself, as it does cookies.
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
        """What a page may send, for the browser that asks; an error for pages that may send nothing."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        return error_response(
            ApiError(ORIGIN_NOT_ALLOWED, "Pages of this origin may not do this; see --allowed-host."), ""
        )
