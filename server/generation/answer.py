"""One answer, streamed or in one piece. Both stop the work as soon as the client has gone."""

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
from server.metrics import Endpoint
from server.schemas.common import Generation
from server.service import Service


class AnswerWriter(Protocol):
    """What ChatAnswer and CompletionAnswer are: two ways to write the same events."""

    @property
    def body(self) -> Generation:
        """What was asked for."""

    async def response(self, events: ChoiceEvents) -> Mapping[str, object]:
        """The events as one JSON object."""

    def teller(self) -> StreamEncoder:
        """Tells the events as those of a stream."""


async def answer(
    http: HttpRequest, service: Service, requests: Sequence[Request], shape: AnswerWriter, endpoint: Endpoint
) -> Response:
    """Run `requests` and answer as the body asks."""
    opening = generate(service, requests, endpoint)
    if shape.body.stream:
        return EventStream(opening, shape.teller(), service.settings.limits)
    return await cancel_on_disconnect(http, _respond(opening, shape))


async def _respond(opening: AbstractAsyncContextManager[ChoiceEvents], shape: AnswerWriter) -> Response:
    async with opening as events:
        answer, body = await shape.response(events), shape.body
        scored = body.prompt_logprobs is not None or getattr(body, "logprobs", None)
        return await large_json_response(answer) if scored else JsonResponse(answer)


async def cancel_on_disconnect(http: HttpRequest, work: Coroutine[None, None, Response]) -> Response:
    """What `work` answers; it is cancelled as soon as the client has gone."""
    own, leaving = asyncio.current_task(), asyncio.create_task(_disconnected(http))
    assert own is not None, "requests run in tasks"
    working = True

    def stop(left: asyncio.Task[None]) -> None:
        if working and not left.cancelled():
            own.cancel()

    leaving.add_done_callback(stop)
    try:
        return await work
    except asyncio.CancelledError:
        # Others may cancel it too, at the end of the server.
        if not leaving.done() or own.uncancel():
            raise
        return Response(status_code=CLIENT_CLOSED)
    finally:
        working = False
        leaving.cancel()


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
