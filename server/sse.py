"""Server-sent events: `data: <json>`, an empty line, and `data: [DONE]` at the end; comments keep silence alive.

sse-starlette sends, pings by the wall clock (so also while a request waits or its prompt is computed), watches for the
client leaving and bounds a send to a reader that stands still. Its defaults are not ours: line ends, cache header,
ping text, and a shutdown of its own, which finds no signal handler of uvicorn's here (lifecycle.py has them).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import EngineError
from server.encoding import dumps
from server.errors import envelope, internal, translate
from server.generation import Events
from server.settings import Caps

logger = logging.getLogger("cellar.http")

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache"}

Chunks = Callable[[Events], AsyncGenerator[Mapping[str, object], None]]
Write = Callable[[Mapping[str, object]], bytes]


def frame(value: Mapping[str, object]) -> bytes:
    """One event."""
    return b"data: %b\n\n" % dumps(value)


def named_frame(value: Mapping[str, object]) -> bytes:
    """One event that has the name of its type, as Responses and Anthropic's API have them."""
    return b"event: %b\n%b" % (str(value["type"]).encode(), frame(value))


class EventStream(Response):
    """A streamed answer. It opens its events before the status goes out, so that a refusal is still a real error.

    write, end  how an event is written, and what follows the last one
    """

    def __init__(
        self,
        opening: AbstractAsyncContextManager[Events],
        chunks: Chunks,
        caps: Caps,
        write: Write = frame,
        end: bytes = DONE,
    ) -> None:
        super().__init__()
        self._opening, self._chunks, self._caps = opening, chunks, caps
        self._write, self._end = write, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit, send, and cancel whatever still runs at the end."""
        async with self._opening as events:
            await send_frames(
                guarded(self._chunks(events), scope["path"], self._write, self._end), self._caps, scope, receive, send
            )


async def send_frames(frames: AsyncIterator[bytes], caps: Caps, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with events, and comments in silence. A client that leaves or stands still ends it early."""
    response = EventSourceResponse(
        frames,
        headers=HEADERS,
        media_type="text/event-stream",
        sep="\n",
        ping=caps.ping_seconds,
        ping_message_factory=_keep_alive,
        send_timeout=caps.write_seconds,
    )
    # Whether the connection stays open is between uvicorn and the client.
    del response.headers["connection"]
    try:
        await response(scope, receive, send)
    except SendTimeoutError:
        logger.info("%s reader stood still, stream cut", scope["state"]["request_id"])


async def guarded(
    chunks: AsyncGenerator[Mapping[str, object], None],
    path: str,
    write: Write,
    end: bytes,
) -> AsyncIterator[bytes]:
    """The chunks as written, then `end`. A fault after the first byte is a chunk too, and no `end` follows it."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield write(chunk)
        except EngineError as error:
            yield write(envelope(translate(error, path), path))
            return
        except Exception:
            # The status has gone out: the border of the HTTP side is here.
            logger.exception("a stream failed")
            yield write(envelope(internal(), path))
            return
    if end:
        yield end


def _keep_alive() -> ServerSentEvent:
    return ServerSentEvent(comment="keep-alive", sep="\n")
