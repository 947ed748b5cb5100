"""The response to a request that waits for the load of its model."""

from __future__ import annotations

import json
from http import HTTPStatus

from starlette.types import Message, Send

from server.http.errors import ANTHROPIC_PREFIX

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
# APIs whose events have names.
NAMED_EVENTS = (ANTHROPIC_PREFIX, "/v1/responses")


class WaitingStream:
    """Sends an event stream whose head and first comment lines precede the response of the route.

    Of that response the head is dropped; the body of an error becomes an event.
    """

    def __init__(self, send: Send, path: str) -> None:
        self._send, self._is_named = send, path in NAMED_EVENTS
        self._began, self._failed, self._error = False, False, b""

    async def comment(self, text: str) -> None:
        """Send a comment line, after the head if it is the first."""
        if not self._began:
            self._began = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        line = " ".join(text.split())
        await self._send({"type": "http.response.body", "body": f": {line}\n\n".encode(), "more_body": True})

    async def send(self, message: Message) -> None:
        """Pass on a message of the route's response."""
        if not self._began:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._failed = message["status"] >= HTTPStatus.BAD_REQUEST
        elif not self._failed:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body"):
                await self._send({"type": "http.response.body", "body": self._error_event(), "more_body": False})

    def _error_event(self) -> bytes:
        # Without line feeds, which would end the event.
        text = json.dumps(json.loads(self._error)).encode()
        return b"event: error\ndata: %b\n\n" % text if self._is_named else b"data: %b\n\n" % text
