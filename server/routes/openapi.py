"""/openapi.json: the types of responses and errors next to FastAPI's request types."""

from __future__ import annotations

import json
import threading
from typing import Any

import anyio.to_thread
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from server.http.parsing import StrictRoute
from server.schemas.errors import ErrorBody

EVENT_STREAM, NDJSON = "text/event-stream", "application/x-ndjson"
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is invalid or cannot be served now."},
    "5XX": {"model": ErrorBody, "description": "The server cannot serve it now."},
}


def streamed_responses(whole: type, media: str) -> dict[int | str, dict[str, Any]]:
    """The responses of a route with a stream: JSON, or chunks of a media type."""
    return {200: {"model": whole, "content": {media: {}}}}


def install(app: FastAPI) -> None:
    """Serve the document of the app; it is built once, in a worker thread."""
    document = _OpenApiDocument(app)

    async def openapi(request: Request) -> Response:
        return Response(await anyio.to_thread.run_sync(document.encoded), media_type="application/json")

    app.add_route("/openapi.json", openapi, include_in_schema=False)


class _OpenApiDocument:
    def __init__(self, app: FastAPI) -> None:
        self._app, self._lock, self._text = app, threading.Lock(), b""

    def encoded(self) -> bytes:
        with self._lock:
            self._text = self._text or json.dumps(self._built(), ensure_ascii=False).encode()
        return self._text

    def _built(self) -> dict[str, Any]:
        for route in self._app.routes:
            if isinstance(route, StrictRoute):
                route.create_response_fields()
        return self._app.openapi()
