"""Streamed responses: the protocol of an encoder, the body that it makes of the events of all choices, and NDJSON.

Server-sent events are in sse.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import anyio.to_thread
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.errors import EngineError
from engine.types.events import Event
from server.http.direct_writer import DirectWriter
from server.http.encoding import dumps
from server.http.errors import ApiError, error_body, from_engine_error, unexpected_error
from server.http.events import ChoiceEvents, is_long

Frames = AsyncGenerator[bytes, None]
EncodeError = Callable[[Mapping[str, object]], bytes]


class StreamEncoder(Protocol):
    """Encodes the events of one response in the format of its API."""

    def encode(self, choice: int, event: Event) -> bytes:
        """The bytes of an event; often none."""

    async def close(self) -> bytes:
        """The bytes after the last event."""


async def encode_stream(
    events: ChoiceEvents, encoder: StreamEncoder, scope: Scope, encode_error: EncodeError, end: bytes
) -> Frames:
    """Yield the body: the encoded events that DirectWriter has not sent, then `end`; an error ends it without `end`.

    The first item may be requested once the response's head has been sent.
    """
    path = scope["path"]
    writer = DirectWriter.of(scope, encoder)
    if writer is not None:
        events.set_sink(writer.write)
    try:
        async for choice, event in events:
            if writer is not None and writer.error is not None:
                raise writer.error
            if body := await _encoded(encoder, choice, event):
                yield body
        if body := await encoder.close():
            yield body
    except EngineError as error:
        yield encode_error(error_body(from_engine_error(error, path), path))
        return
    except Exception as error:
        # The status has been sent, so no outer layer can answer this error.
        yield encode_error(error_body(unexpected_error(error, "a stream"), path))
        return
    if end:
        yield end


async def _encoded(encoder: StreamEncoder, choice: int, event: Event) -> bytes:
    if is_long(event):
        # No other event is encoded meanwhile: DirectWriter takes those that arrive while the iterator waits.
        return await anyio.to_thread.run_sync(encoder.encode, choice, event)
    return encoder.encode(choice, event)


async def with_error_frame(frames: Frames, scope: Scope, encode_error: EncodeError) -> Frames:
    """The frames; an error ends them with a frame of its own."""
    try:
        async for body in frames:
            yield body
    except (EngineError, ApiError) as error:
        shown = error if isinstance(error, ApiError) else from_engine_error(error, scope["path"])
        yield encode_error(error_body(shown, scope["path"]))
    except Exception as error:
        # The status has been sent, so no outer layer can answer this error.
        yield encode_error(error_body(unexpected_error(error, "a stream"), scope["path"]))


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
