"""Server-sent events: `data: <json>` and an empty line each, `data: [DONE]` at the end, comment lines as keep-alive.

sse-starlette's EventSourceResponse sends them, adds the keep-alive lines (also during the queue time and the prefill)
and ends the stream when the client disconnects. Its defaults for line ends, cache header and keep-alive text are
replaced. DirectWriter sends most text deltas; protocol.py limits the time of a blocked send.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.configuration.settings import ClientLimits
from server.http.encoding import dumps
from server.http.events import ChoiceEvents
from server.http.stream_encoder import EncodeError, Frames, StreamEncoder, encode_stream

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache"}


def frame(value: Mapping[str, object]) -> bytes:
    """One unnamed event."""
    return b"data: %b\n\n" % dumps(value)


def named_frame(value: Mapping[str, object]) -> bytes:
    """One event with its type as name, as in the Responses and Anthropic APIs."""
    return b"event: %b\n%b" % (str(value["type"]).encode(), frame(value))


class EventStream(Response):
    """A streamed response. Its events are opened before the status is sent, so a refused request gets an error status.

    encode_error  makes a frame of an error body
    end           follows the last frame
    """

    def __init__(
        self,
        opening: AbstractAsyncContextManager[ChoiceEvents],
        encoder: StreamEncoder,
        limits: ClientLimits,
        encode_error: EncodeError = frame,
        end: bytes = DONE,
    ) -> None:
        super().__init__()
        self._opening, self._encoder, self._limits = opening, encoder, limits
        self._encode_error, self._end = encode_error, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open the events, send them, and cancel the request if the client disconnects."""
        async with self._opening as events:
            frames = encode_stream(events, self._encoder, scope, self._encode_error, self._end)
            await send_event_stream(frames, self._limits, scope, receive, send)


async def send_event_stream(frames: Frames, limits: ClientLimits, scope: Scope, receive: Receive, send: Send) -> None:
    """Send frames as an event stream, with keep-alive comments, until the end or the client's disconnect."""
    response = EventSourceResponse(
        frames,
        headers=HEADERS,
        media_type="text/event-stream",
        sep="\n",
        ping=limits.ping_seconds,
        ping_message_factory=_keep_alive,
    )
    # uvicorn decides whether the connection stays open.
    del response.headers["connection"]
    await response(scope, receive, send)


def _keep_alive() -> ServerSentEvent:
    return ServerSentEvent(comment="keep-alive", sep="\n")
