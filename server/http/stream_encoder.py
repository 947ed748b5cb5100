"""How answers are told as they come: what each event becomes on the wire, and the short way there.

Between two steps of a model the code of the event loop is in no cache of the processor, so that every layer costs. What
can be told at once is told right where the engine delivers it, and nobody is woken for it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Protocol

from starlette.types import Scope

from engine.errors import EngineError
from engine.types.events import Delta, Event
from server.http.errors import error_body, from_engine_error, internal_error
from server.http.events import ChoiceEvents

logger = logging.getLogger("cellar.http")

# Where the state of a request holds its Connection, if the server that runs the app gives one.
CONNECTION = "connection"

Frames = AsyncGenerator[bytes, None]
EncodeError = Callable[[Mapping[str, object]], bytes]


class StreamEncoder(Protocol):
    """One answer in the words of its API."""

    def encode(self, choice: int, event: Event) -> bytes:
        """What goes over the wire for an event; often nothing."""

    async def close(self) -> bytes:
        """What follows all events."""


class Connection(Protocol):
    """ASGI's `send` without its layers, for the body of an answer that has begun.

    writable  whether the client takes what it is sent
    """

    writable: bool

    @property
    def sending_chunks(self) -> bool:
        """Whether the answer is of the kind that `write` can send."""

    def write(self, body: bytes) -> None:
        """Send a piece of the body."""


async def encode_stream(
    events: ChoiceEvents, encoder: StreamEncoder, scope: Scope, encode_error: EncodeError, end: bytes
) -> Frames:
    """What is told of all events and goes no shorter way, then `end`. It is first asked when the answer has begun.

    A fault is told too, as `encode_error` writes an error, and no `end` follows it.
    """
    path = scope["path"]
    faults = _shorten(events, encoder, scope)
    try:
        async for choice, event in events:
            if faults:
                raise faults[0]
            if body := encoder.encode(choice, event):
                yield body
        if body := await encoder.close():
            yield body
    except EngineError as error:
        yield encode_error(error_body(from_engine_error(error, path), path))
        return
    except Exception:
        # The status has gone out: the border of the HTTP side is here.
        logger.exception("a stream failed")
        yield encode_error(error_body(internal_error(), path))
        return
    if end:
        yield end


def _shorten(events: ChoiceEvents, teller: StreamEncoder, scope: Scope) -> list[Exception]:
    """Let deltas go the short way, where there is one; what breaks there."""
    faults: list[Exception] = []
    connection: Connection | None = scope.get("state", {}).get(CONNECTION)
    if connection is not None and connection.sending_chunks:
        events.shorten(partial(_send, teller, connection, faults))
    return faults


def _send(teller: StreamEncoder, connection: Connection, faults: list[Exception], choice: int, delta: Delta) -> bool:
    if not connection.writable:
        return False
    try:
        body = teller.encode(choice, delta)
    except Exception as fault:
        # Who called delivers to all streams; whoever reads this one raises it instead.
        faults.append(fault)
        return False
    if body:
        connection.write(body)
    return True
