"""Answers of one JSON object a line, as Ollama's clients read them."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager

import anyio
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from server.encoding import dumps
from server.generation import Events
from server.settings import Caps
from server.sse import guarded

logger = logging.getLogger("cellar.http")

Lines = Callable[[Events], AsyncGenerator[Mapping[str, object], None]]


class LineStream(Response):
    """A streamed answer. It opens its events before the status goes out, so that a refusal is still a real error."""

    def __init__(self, opening: AbstractAsyncContextManager[Events], lines: Lines, caps: Caps) -> None:
        super().__init__()
        self._opening, self._lines, self._caps = opening, lines, caps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit, send, and cancel whatever still runs at the end, or when the reader leaves or stands still."""

        async def bounded(message: Message) -> None:
            with anyio.fail_after(self._caps.write_seconds):
                await send(message)

        async with self._opening as events:
            lines = guarded(self._lines(events), scope["path"], _line, b"")
            response = StreamingResponse(lines, media_type="application/x-ndjson")
            try:
                await response(scope, receive, bounded)
            except* TimeoutError:
                logger.info("%s reader stood still, stream cut", scope["state"]["request_id"])


def _line(value: Mapping[str, object]) -> bytes:
    return dumps(value) + b"\n"
