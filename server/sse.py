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


class EventStream(Response):
    """A streamed answer. It opens its events before the status goes out, so that a refusal is still a real error."""

    def __init__(self, opening: AbstractAsyncContextManager[Events], chunks: Chunks, caps: Caps) -> None:
        super().__init__()
        self._opening, self._chunks, self._caps = opening, chunks, caps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit, send, and cancel whatever still runs at the end."""
        async with self._opening as events:
            response = EventSourceResponse(
                _frames(self._chunks(events), scope["path"]),
                headers=HEADERS,
                media_type="text/event-stream",
                sep="\n",
                ping=self._caps.ping_seconds,
                ping_message_factory=_keep_alive,
                send_timeout=self._caps.write_seconds,
            )
            # Whether the connection stays open is between uvicorn and the client.
            del response.headers["connection"]
            try:
                await response(scope, receive, send)
            except SendTimeoutError:
                logger.info("%s reader stood still, stream cut", scope["state"]["request_id"])


async def _frames(chunks: AsyncGenerator[Mapping[str, object], None], path: str) -> AsyncIterator[bytes]:
    """The chunks as events. A fault after the first byte is an event too, and no [DONE] follows it."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield frame(chunk)
        except EngineError as error:
            yield frame(envelope(translate(error, path), path))
            return
        except Exception:
            # The status has gone out: the border of the HTTP side is here.
            logger.exception("a stream failed")
            yield frame(envelope(internal(), path))
            return
    yield DONE


def frame(value: Mapping[str, object]) -> bytes:
    """One event."""
    return b"data: %b\n\n" % dumps(value)


def _keep_alive() -> ServerSentEvent:
    return ServerSentEvent(comment="keep-alive", sep="\n")
