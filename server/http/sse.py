"""Server-sent events: `data: <json>`, an empty line, and `data: [DONE]` at the end; comments keep silence alive.

sse-starlette begins and ends a stream, pings by the wall clock (so also while a request waits or its prompt is
computed) and watches for the client leaving. Its defaults are not ours: line ends, cache header, ping text, and a
shutdown of its own, which finds no signal handler of uvicorn's here (lifecycle.py has them). Events go round it: it
opens a scope of cancellation for each, and most take a shorter way (teller.py). protocol.py cuts a reader that stands
still.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, aclosing

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.http.encoding import dumps
from server.http.events import ChoiceEvents
from server.http.stream_encoder import EncodeError, Frames, StreamEncoder, encode_stream
from server.settings import ClientLimits

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache"}


def frame(value: Mapping[str, object]) -> bytes:
    """One event."""
    return b"data: %b\n\n" % dumps(value)


def named_frame(value: Mapping[str, object]) -> bytes:
    """One event that has the name of its type, as Responses and Anthropic's API have them."""
    return b"event: %b\n%b" % (str(value["type"]).encode(), frame(value))


class EventStream(Response):
    """A streamed answer. It opens its events before the status goes out, so that a refusal is still a real error.

    teller  the answer as it goes over the wire
    write   how an error is written
    end     what follows the last frame
    """

    def __init__(
        self,
        opening: AbstractAsyncContextManager[ChoiceEvents],
        encoder: StreamEncoder,
        caps: ClientLimits,
        encode_error: EncodeError = frame,
        end: bytes = DONE,
    ) -> None:
        super().__init__()
        self._opening, self._teller, self._caps = opening, encoder, caps
        self._write, self._end = encode_error, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit, send, and cancel whatever still runs at the end."""
        async with self._opening as events:
            frames = encode_stream(events, self._teller, scope, self._write, self._end)
            await send_event_stream(frames, self._caps, scope, receive, send)


async def send_event_stream(frames: Frames, caps: ClientLimits, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with events, and comments in silence. A client that leaves ends it early."""
    response = EventSourceResponse(
        _sent_directly(frames, send),
        headers=HEADERS,
        media_type="text/event-stream",
        sep="\n",
        ping=caps.ping_seconds,
        ping_message_factory=_keep_alive,
    )
    # Whether the connection stays open is between uvicorn and the client.
    del response.headers["connection"]
    await response(scope, receive, send)


async def _sent_directly(frames: Frames, send: Send) -> Frames:
    """The content of a response, which sends itself and leaves nothing to be sent."""
    async with aclosing(frames):
        async for body in frames:
            await send({"type": "http.response.body", "body": body, "more_body": True})
    rest: tuple[bytes, ...] = ()
    for body in rest:
        yield body


def _keep_alive() -> ServerSentEvent:
    return ServerSentEvent(comment="keep-alive", sep="\n")
