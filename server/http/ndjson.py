"""Streamed responses of one JSON object a line (Ollama)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from server.http.encoding import dumps
from server.http.events import ChoiceEvents
from server.http.stream_encoder import StreamEncoder, encode_stream


class NdjsonStream(Response):
    """A streamed response. Its events are opened before the status is sent, so a refusal has an error status."""

    def __init__(self, opening: AbstractAsyncContextManager[ChoiceEvents], encoder: StreamEncoder) -> None:
        super().__init__()
        self._opening, self._encoder = opening, encoder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open the events, send them, and cancel the request at the end or if the client disconnects."""
        async with self._opening as events:
            lines = encode_stream(events, self._encoder, scope, json_line, b"")
            await StreamingResponse(lines, media_type="application/x-ndjson")(scope, receive, send)


def json_line(value: Mapping[str, object]) -> bytes:
    """One object and a line feed."""
    return dumps(value) + b"\n"
