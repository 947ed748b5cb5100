"""/openapi.json: the types of responses, stream events and errors beside FastAPI's request types."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from typing import Any

import anyio.to_thread
from fastapi import FastAPI
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from server.http.parsing import StrictRoute
from server.schemas.anthropic_answer import AnthropicEvent
from server.schemas.chat import ChatChunk
from server.schemas.completions import Completion
from server.schemas.errors import ErrorBody
from server.schemas.ollama import OllamaLine
from server.schemas.response_items import ResponseEvent

SCHEMA_REFERENCE = "#/components/schemas/{model}"

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is invalid or cannot be served now."},
    "5XX": {"model": ErrorBody, "description": "The server cannot serve it now."},
}


def event_stream_responses(whole: type, chunk: Any) -> dict[int | str, dict[str, Any]]:
    """The responses of a route with server-sent events: JSON, or events with JSON data."""
    return _with_stream(whole, "text/event-stream", functools.partial(_event_schema, chunk))


def ndjson_responses(line: type) -> dict[int | str, dict[str, Any]]:
    """The responses of a route with NDJSON: a JSON object, or one a line."""
    return _with_stream(line, "application/x-ndjson", functools.partial(_schema, line))


def install(app: FastAPI) -> None:
    """Serve the document of the app with the types of events; it is built once, in a worker thread."""
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
                _create_item_schemas(route)
        document = self._app.openapi()
        for chunk in (ChatChunk, Completion, ResponseEvent, AnthropicEvent, OllamaLine):
            document["components"]["schemas"].update(_definitions(chunk))
        return document


def _with_stream(whole: type, media: str, item: Callable[[], dict[str, Any]]) -> dict[int | str, dict[str, Any]]:
    # OpenAPI 3.2 describes the items of a stream like this. Their schemas would take 0.15 s of each start (measured).
    return {200: {"model": whole, "content": {media: {"itemSchema": item}}}}


def _create_item_schemas(route: StrictRoute) -> None:
    """Replace the functions of `_with_stream` by their schemas."""
    for response in route.responses.values():
        for media in response.get("content", {}).values():
            if callable(item := media.get("itemSchema")):
                media["itemSchema"] = item()


def _event_schema(chunk: Any) -> dict[str, Any]:
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": _schema(chunk)}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}


@functools.cache
def _schema(shape: Any) -> dict[str, Any]:
    schema = TypeAdapter(shape).json_schema(ref_template=SCHEMA_REFERENCE)
    return {key: value for key, value in schema.items() if key != "$defs"}


def _definitions(shape: Any) -> dict[str, Any]:
    definitions: dict[str, Any] = TypeAdapter(shape).json_schema(ref_template=SCHEMA_REFERENCE).get("$defs", {})
    return definitions
