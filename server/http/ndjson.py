"""Answers of one JSON object a line, as Ollama's clients read them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from server.http.encoding import dumps
from server.http.events import ChoiceEvents
from server.http.stream_encoder import StreamEncoder, encode_stream


class NdjsonStream(Response):
    """A streamed answer. It opens its events before the status goes out, so that a refusal is still a real error."""

    def __init__(self, opening: AbstractAsyncContextManager[ChoiceEvents], encoder: StreamEncoder) -> None:
        super().__init__()
        self._opening, self._teller = opening, encoder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit, send, and cancel whatever still runs at the end, or when the reader leaves."""
        async with self._opening as events:
            lines = encode_stream(events, self._teller, scope, json_line, b"")
            await StreamingResponse(lines, media_type="application/x-ndjson")(scope, receive, send)


def json_line(value: Mapping[str, object]) -> bytes:
    """One object."""
    return dumps(value) + b"\n"
