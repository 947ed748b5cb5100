"""The generation of one response: an asyncio task, its event frames so far, and the streams that follow them.

A foreground task is aborted when its client disconnects; a background task ends at its end or by cancellation. Every
stream gets all events, earlier ones included.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from typing import Any

from engine.errors import EngineError
from engine.types.content import Content
from engine.types.events import Finished, Started
from server.generation.chat_turn import ChatTurn, ChoiceDelta, ChoiceEnd, EarlierDelta, parse_choices
from server.generation.logprobs import chat_logprobs
from server.generation.usage import cache_write_tokens, content_tokens
from server.http.errors import ApiError, check_deadline, unexpected_error
from server.http.events import ChoiceEvents
from server.http.sse import named_frame
from server.responses.archive import NOT_STORED
from server.responses.partial_items import EventFields
from server.responses.translation import renamed_error
from server.responses.writer import ResponseWriter
from server.schemas.chat import ChatLogprob
from server.schemas.response_items import CacheDiagnostics, ResponseBody, ResponseUsage
from server.store.database import StoreError

logger = logging.getLogger("cellar.http")

# Stores a response with its event frames and output tokens, before the last events are published.
SaveResponse = Callable[[ResponseBody, Sequence[bytes], Sequence[int]], Awaitable[None]]
Diagnose = Callable[[int], CacheDiagnostics]
Item = dict[str, Any]


class ResponseTask:
    """`save` is called once, when the response is final, unless the task was aborted.

    items     all items of the prompt
    diagnose  cache diagnostics for a number of cached tokens, if requested
    """

    def __init__(
        self,
        turn: ChatTurn,
        writer: ResponseWriter,
        save: SaveResponse,
        items: Sequence[Item] = (),
        diagnose: Diagnose | None = None,
    ) -> None:
        self._turn, self._writer, self._save, self._diagnose = turn, writer, save, diagnose
        self.items = items
        self._frames: list[bytes] = []
        self._tokens: list[int] = []
        self._changed = asyncio.Event()
        self._admission = AsyncExitStack()
        self._task: asyncio.Task[None] | None = None
        self._cancelled = self._done = False
        self.error: ApiError | None = None

    @property
    def response(self) -> ResponseBody:
        """The current state of the response."""
        return self._writer.response

    @property
    def output(self) -> list[Item]:
        """The output items so far."""
        return [dict(item) for item in self.response["output"]]

    @property
    def frames(self) -> Sequence[bytes]:
        """The event frames so far."""
        return self._frames

    async def start(
        self, opening: AbstractAsyncContextManager[ChoiceEvents], store: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Start the generation; raises the error of an engine that cannot accept it.

        store  called when the engine has accepted it, before the first token is read; its error ends the generation
        """
        async with AsyncExitStack() as admission:
            events = await admission.enter_async_context(opening)
            if store is not None:
                await store()
            self._admission = admission.pop_all()
        self._emit(self._writer.created())
        if self.response["status"] != "queued":
            self._emit(self._writer.in_progress())
        self._task = asyncio.create_task(self._work(events))

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yield the events after number `after` up to the last one."""
        position = after + 1
        while not self._done or position < len(self._frames):
            changed = self._changed
            if position < len(self._frames):
                yield b"".join(self._frames[position:])
                position = len(self._frames)
            else:
                await changed.wait()

    async def wait_finished(self) -> ResponseBody:
        """The final response; ApiError if it failed."""
        assert self._task is not None
        await asyncio.wait({self._task})
        if self.error is not None:
            raise self.error
        return self.response

    def add_done_callback(self, act: Callable[[], object]) -> None:
        """Call `act` when the task has ended in any way."""
        assert self._task is not None
        self._task.add_done_callback(lambda _: act())

    async def cancel(self) -> None:
        """Cancel the generation and wait until the response is stored."""
        self._cancelled = True
        await self.abort()

    async def abort(self) -> None:
        """Stop the generation without storing anything. No effect on a finished task."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
        # A task cancelled before its first step has not closed it.
        await self._admission.aclose()

    async def _work(self, events: ChoiceEvents) -> None:
        try:
            async with self._admission:
                last = await self._final_events(events)
            frames = _encoded(last)
            try:
                await self._save(self.response, [*self._frames, *frames], self._tokens)
            except StoreError as error:
                logger.error("a response could not be stored: %s", error)
                frames = [*frames[:-1], *_encoded(self._writer.not_stored(NOT_STORED))]
            self._publish(frames)
        finally:
            self._done = True
            self._publish(())

    async def _final_events(self, events: ChoiceEvents) -> Iterable[EventFields]:
        """Publish all events but the last ones, which are returned: the response is stored before their publication."""
        try:
            return await self._read_events(events)
        except (ApiError, EngineError) as error:
            return self._failure(renamed_error(error))
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            return list(self._writer.cancel())
        except Exception as error:
            # The boundary of this task: no caller would see the exception.
            return self._failure(unexpected_error(error, "a response"))

    async def _read_events(self, events: ChoiceEvents) -> Iterable[EventFields]:
        async with aclosing(parse_choices(self._turn, events)) as items:
            async for _, item in items:
                match item:
                    case Started() if self.response["status"] == "queued":
                        self._emit(self._writer.in_progress())
                    case ChoiceDelta() | EarlierDelta():
                        delta = item.delta if isinstance(item, EarlierDelta) else item
                        self._tokens.extend(delta.tokens)
                        self._emit(self._writer.add(delta.deltas, self._logprobs(delta)))
                    case ChoiceEnd():
                        check_deadline([item.finished])
                        self._tokens.extend(item.finished.tokens)
                        return list(self._end(item))
        raise AssertionError("the engine ends every stream with Finished or Failed")

    def _end(self, ended: ChoiceEnd) -> Iterable[EventFields]:
        usage = response_usage(ended.finished, ended.reasoning_tokens, self._turn.requests[0].contents)
        diagnostics = self._diagnose and self._diagnose(ended.finished.usage.cached_tokens)
        return self._writer.finish("incomplete" if ended.reason == "length" else "completed", usage, diagnostics)

    def _failure(self, error: ApiError) -> Iterable[EventFields]:
        self.error = error
        body: Any = error.body["error"]
        return list(self._writer.fail(body))

    def _logprobs(self, item: ChoiceDelta) -> Sequence[ChatLogprob]:
        return chat_logprobs(item.logprobs)["content"] if self._turn.body.logprobs else ()

    def _emit(self, events: Iterable[EventFields]) -> None:
        self._publish(_encoded(events))

    def _publish(self, frames: Sequence[bytes]) -> None:
        self._frames.extend(frames)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _encoded(events: Iterable[EventFields]) -> list[bytes]:
    return [named_frame(event) for event in events]


def response_usage(finished: Finished, reasoning: int, contents: Sequence[Content] = ()) -> ResponseUsage:
    """Token usage in the format of this API."""
    cost = finished.usage
    return ResponseUsage(
        input_tokens=cost.prompt_tokens,
        input_tokens_details={
            "cached_tokens": cost.cached_tokens,
            "cache_write_tokens": cache_write_tokens(finished),
            **content_tokens(contents),
        },
        output_tokens=cost.completion_tokens,
        output_tokens_details={"reasoning_tokens": reasoning},
        total_tokens=cost.prompt_tokens + cost.completion_tokens,
    )
