"""/v1/responses: create, read, stream again, cancel, delete, compact, count the tokens of an input; WebSockets."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Annotated, Literal

from fastapi import FastAPI, Query, Request, WebSocket
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.generation.answering import unless_gone
from server.http.auth import owner
from server.http.encoding import Json
from server.http.errors import invalid
from server.http.lenient import warnings
from server.http.sse import send_frames
from server.responses.archive import Item
from server.responses.desk import Desk
from server.responses.run import Run
from server.responses.session import Session
from server.routes.documented import RESPONSES, streamed
from server.schemas.response_items import (
    Compaction,
    InputItems,
    InputTokens,
    ResponseBody,
    ResponseDeleted,
    ResponseEvent,
)
from server.schemas.responses import CompactRequest, Prompted, ResponseRequest
from server.service import Service
from server.settings import Caps
from server.store.store import open_store

PATH = "/v1/responses"
WHOLE = {**RESPONSES, **streamed(ResponseBody, ResponseEvent)}

Limit = Annotated[int, Query(ge=1, le=100)]
After = Annotated[int, Query(ge=-1, le=2**31 - 1)]


def add(app: FastAPI, service: Service) -> Desk:
    """Add the routes; whoever made the app closes what is answered."""
    desk = Desk(service, open_store(service.settings.store))
    _add_makers(app, desk, service.settings.caps)
    _add_readers(app, desk, service.settings.caps)

    @app.websocket(PATH)
    async def converse(socket: WebSocket) -> None:
        await Session(socket, desk.of(owner(socket))).serve()

    return desk


def _add_makers(app: FastAPI, desk: Desk, caps: Caps) -> None:
    @app.post(PATH, responses=WHOLE)
    async def create_response(body: ResponseRequest, request: Request) -> Response:
        """Answer an input, which may go on from an earlier response."""
        run = await desk.of(owner(request)).create(body, warnings(request))
        left = None if body.background else run.leave
        if body.stream:
            return FrameStream(run.follow(), caps, left)
        return Json(run.response) if body.background else await unless_gone(request, _finished(run))

    @app.post(f"{PATH}/input_tokens", responses={**RESPONSES, 200: {"model": InputTokens}})
    async def count_input_tokens(body: Prompted, request: Request) -> Response:
        """Count the tokens of the prompt that an input makes."""
        return Json(InputTokens(object="response.input_tokens", input_tokens=await desk.of(owner(request)).count(body)))

    @app.post(f"{PATH}/compact", responses={**RESPONSES, 200: {"model": Compaction}})
    async def compact_conversation(body: CompactRequest, request: Request) -> Response:
        """Replace a conversation by items that take less of the context: the served model writes a summary."""

        async def work() -> Response:
            return Json(await desk.of(owner(request)).compact(body))

        return await unless_gone(request, work())

    @app.post(f"{PATH}/{{response_id}}/cancel", responses={**RESPONSES, 200: {"model": ResponseBody}})
    async def cancel_response(response_id: str, request: Request) -> Response:
        """End a response in the background."""
        return Json(await desk.of(owner(request)).cancel(response_id))


def _add_readers(app: FastAPI, desk: Desk, caps: Caps) -> None:
    @app.get(f"{PATH}/{{response_id}}", responses=WHOLE)
    async def retrieve_response(
        response_id: str, request: Request, stream: bool = False, starting_after: After = -1
    ) -> Response:
        """Read a response as it stands, or its events behind number `starting_after`, to its end."""
        own = desk.of(owner(request))
        if not stream:
            return Json(await own.response(response_id))
        run = own.running(response_id)
        if run is not None:
            return FrameStream(run.follow(starting_after), caps)
        return FrameStream(_told((await own.frames(response_id))[starting_after + 1 :]), caps)

    @app.delete(f"{PATH}/{{response_id}}", responses={**RESPONSES, 200: {"model": ResponseDeleted}})
    async def delete_response(response_id: str, request: Request) -> Response:
        """Forget a response; work on it stops."""
        await desk.of(owner(request)).delete(response_id)
        return Json(ResponseDeleted(id=response_id, object="response", deleted=True))

    @app.get(f"{PATH}/{{response_id}}/input_items", responses={**RESPONSES, 200: {"model": InputItems}})
    async def list_input_items(
        response_id: str,
        request: Request,
        limit: Limit = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """List all that a response was made from, latest first."""
        items = await desk.of(owner(request)).input_items(response_id)
        return Json(_page(items if order == "asc" else items[::-1], limit, after))


class FrameStream(Response):
    """Events that are bytes already; `left` is called at the end, or when the client has gone."""

    def __init__(
        self, frames: AsyncGenerator[bytes, None], caps: Caps, left: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        super().__init__()
        self._frames, self._caps, self._left = frames, caps, left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them as they come."""
        try:
            await send_frames(self._frames, self._caps, scope, receive, send)
        finally:
            if self._left is not None:
                await self._left()


async def _finished(run: Run) -> Response:
    try:
        return Json(await run.finished())
    finally:
        await run.leave()


async def _told(frames: Sequence[bytes]) -> AsyncGenerator[bytes, None]:
    yield b"".join(frames)


def _page(items: Sequence[Item], limit: int, after: str | None) -> InputItems:
    names = [item["id"] for item in items]
    if after is not None and after not in names:
        raise invalid("after", "no item has this id")
    begin = 0 if after is None else names.index(after) + 1
    page = items[begin : begin + limit]
    return InputItems(
        object="list",
        data=list(page),
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=begin + limit < len(items),
    )
