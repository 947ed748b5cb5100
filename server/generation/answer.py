"""Runs the requests of a body and responds, streamed or not; a disconnect of the client cancels the work."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.types.request import Request
from server.generation.requests import generate
from server.http.encoding import JsonResponse, large_json_response
from server.http.errors import CLIENT_CLOSED
from server.http.events import ChoiceEvents
from server.http.sse import EventStream
from server.http.stream_encoder import StreamEncoder
from server.metrics.metrics import Endpoint
from server.schemas.common import Generation
from server.service import Service


class AnswerWriter(Protocol):
    """Writes the events of a request as one JSON object or as a stream."""

    @property
    def body(self) -> Generation:
        """The request body."""

    async def response(self, events: ChoiceEvents) -> Mapping[str, object]:
        """All events as one JSON object."""

    def encoder(self) -> StreamEncoder:
        """Encoder of the events of a stream."""


async def answer(
    http: HttpRequest, service: Service, requests: Sequence[Request], writer: AnswerWriter, endpoint: Endpoint
) -> Response:
    """Run `requests` and respond as a stream or as one JSON object."""
    opening = generate(service, requests, endpoint)
    if writer.body.stream:
        return EventStream(opening, writer.encoder(), service.settings.limits)
    return await cancel_on_disconnect(http, _respond(opening, writer))


async def _respond(opening: AbstractAsyncContextManager[ChoiceEvents], writer: AnswerWriter) -> Response:
    async with opening as events:
        answer, body = await writer.response(events), writer.body
        scored = body.prompt_logprobs is not None or getattr(body, "logprobs", None)
        return await large_json_response(answer) if scored else JsonResponse(answer)


async def cancel_on_disconnect(http: HttpRequest, work: Coroutine[None, None, Response]) -> Response:
    """The response of `work`, which is cancelled when the client disconnects."""
    current, disconnect = asyncio.current_task(), asyncio.create_task(_disconnected(http))
    assert current is not None, "requests run in tasks"
    working = True

    def stop(task: asyncio.Task[None]) -> None:
        if working and not task.cancelled():
            current.cancel()

    disconnect.add_done_callback(stop)
    try:
        return await work
    except asyncio.CancelledError:
        # The task may also be cancelled by a shutdown.
        if not disconnect.done() or current.uncancel():
            raise
        return Response(status_code=CLIENT_CLOSED)
    finally:
        working = False
        disconnect.cancel()


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
