"""/v1/responses: create, read, stream, cancel, delete, compact, count tokens; WebSockets."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Annotated, Literal

from fastapi import FastAPI, Query, Request, WebSocket
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.configuration.settings import ClientLimits
from server.generation.answer import cancel_on_disconnect
from server.http.auth import count_owners, first_owner, owner
from server.http.descriptors import connection_limit
from server.http.encoding import JsonResponse
from server.http.lenient import warnings
from server.http.paging import page
from server.http.sse import send_event_stream
from server.models.registry import ModelRegistry
from server.responses.response_service import ResponseService
from server.responses.task import ResponseTask
from server.responses.websocket import WebSocketLimit, WebSocketSession
from server.routes.openapi import ERROR_RESPONSES, EVENT_STREAM, streamed_responses
from server.schemas.response_items import (
    Compaction,
    ResponseBody,
    ResponseDeleted,
    ResponseInputTokens,
)
from server.schemas.responses import CompactRequest, PromptFields, ResponseRequest
from server.store.store import open_store

PATH = "/v1/responses"
RESPONSE_SCHEMAS = {**ERROR_RESPONSES, **streamed_responses(ResponseBody, EVENT_STREAM)}

Limit = Annotated[int, Query(ge=1, le=100)]
After = Annotated[int, Query(ge=-1, le=2**31 - 1)]


def add(app: FastAPI, models: ModelRegistry) -> ResponseService:
    """Add the routes; the app's owner closes the returned service."""
    settings = models.settings
    first = first_owner(*settings.read_keys())
    responses = ResponseService(models, open_store(settings.store, first))
    _add_create_routes(app, responses, models.settings.limits)
    _add_read_routes(app, responses, models.settings.limits)

    connections = connection_limit(models.settings.limits.connections)
    websockets = WebSocketLimit(connections, count_owners(*settings.read_keys()))

    @app.websocket(PATH)
    async def converse(socket: WebSocket) -> None:
        address = "" if socket.client is None else socket.client.host
        with websockets.hold(owner(socket), address):
            await WebSocketSession(socket, responses.for_owner(owner(socket))).serve()

    return responses


def _add_create_routes(app: FastAPI, responses: ResponseService, limits: ClientLimits) -> None:
    @app.post(PATH, responses=RESPONSE_SCHEMAS)
    async def create_response(body: ResponseRequest, request: Request) -> Response:
        """Answer an input, which may continue an earlier response."""
        task = await responses.for_owner(owner(request)).create(body, warnings(request))
        on_close = None if body.background else task.abort
        if body.stream:
            return FrameStreamResponse(task.follow(), limits, on_close)
        return (
            JsonResponse(task.response)
            if body.background
            else await cancel_on_disconnect(request, _finished_response(task))
        )

    @app.post(f"{PATH}/input_tokens", responses={**ERROR_RESPONSES, 200: {"model": ResponseInputTokens}})
    async def count_input_tokens(body: PromptFields, request: Request) -> Response:
        """Count the tokens of an input's prompt."""
        return JsonResponse(
            ResponseInputTokens(
                object="response.input_tokens", input_tokens=await responses.for_owner(owner(request)).count(body)
            )
        )

    @app.post(f"{PATH}/compact", responses={**ERROR_RESPONSES, 200: {"model": Compaction}})
    async def compact_conversation(body: CompactRequest, request: Request) -> Response:
        """Replace a conversation by items that take less of the context: the served model writes a summary."""

        async def work() -> Response:
            return JsonResponse(await responses.for_owner(owner(request)).compact(body))

        return await cancel_on_disconnect(request, work())

    @app.post(f"{PATH}/{{response_id}}/cancel", responses={**ERROR_RESPONSES, 200: {"model": ResponseBody}})
    async def cancel_response(response_id: str, request: Request) -> Response:
        """Cancel a background response."""
        return JsonResponse(await responses.for_owner(owner(request)).cancel(response_id))


def _add_read_routes(app: FastAPI, responses: ResponseService, limits: ClientLimits) -> None:
    @app.get(f"{PATH}/{{response_id}}", responses=RESPONSE_SCHEMAS)
    async def retrieve_response(
        response_id: str, request: Request, stream: bool = False, starting_after: After = -1
    ) -> Response:
        """Return the current response, or stream its events after number `starting_after` up to its end."""
        service = responses.for_owner(owner(request))
        if not stream:
            return JsonResponse(await service.response(response_id))
        task = service.running(response_id)
        if task is not None:
            return FrameStreamResponse(task.follow(starting_after), limits)
        return FrameStreamResponse(_joined_frames((await service.frames(response_id))[starting_after + 1 :]), limits)

    @app.delete(f"{PATH}/{{response_id}}", responses={**ERROR_RESPONSES, 200: {"model": ResponseDeleted}})
    async def delete_response(response_id: str, request: Request) -> Response:
        """Delete a response; its generation is cancelled."""
        await responses.for_owner(owner(request)).delete(response_id)
        return JsonResponse(ResponseDeleted(id=response_id, object="response", deleted=True))

    @app.get(f"{PATH}/{{response_id}}/input_items", responses=ERROR_RESPONSES)
    async def list_input_items(
        response_id: str,
        request: Request,
        limit: Limit = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """List all items in front of a response's output, latest first."""
        items = await responses.for_owner(owner(request)).input_items(response_id)
        items = items if order == "asc" else items[::-1]
        return JsonResponse(page(items, [item["id"] for item in items], limit, after, kind="item"))


class FrameStreamResponse(Response):
    """Streams encoded events; `on_close` is called at the end, or after the client's disconnect."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        limits: ClientLimits,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__()
        self._frames, self._limits, self._on_close = frames, limits, on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await send_event_stream(self._frames, self._limits, scope, receive, send)
        finally:
            if self._on_close is not None:
                await self._on_close()


async def _finished_response(task: ResponseTask) -> Response:
    try:
        return JsonResponse(await task.wait_finished())
    finally:
        await task.abort()


async def _joined_frames(frames: Sequence[bytes]) -> AsyncGenerator[bytes, None]:
    yield b"".join(frames)
