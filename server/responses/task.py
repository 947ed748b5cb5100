"""One response being made: a task of its own, the events so far, and all who follow them.

A foreground run ends when its client leaves, a background run when it is done or cancelled. Everybody gets the same
events, and whoever follows late the earlier ones too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from typing import Any

from engine.errors import EngineError
from engine.types.events import Finished, Started
from server.generation.chat_turn import ChatTurn, ChoiceDelta, ChoiceEnd, parse_choices
from server.generation.logprobs import chat_logprobs
from server.generation.usage import cache_write_tokens
from server.http.errors import ApiError, check_deadline, internal_error
from server.http.events import ChoiceEvents
from server.http.sse import named_frame
from server.responses.archive import NOT_STORED
from server.responses.translation import renamed_error
from server.responses.writer import ResponseWriter
from server.schemas.chat import ChatLogprob
from server.schemas.response_items import CacheDiagnostics, ResponseBody, ResponseEvent, ResponseUsage
from server.store.database import StoreError

logger = logging.getLogger("cellar.http")

# Keeps a response with its events, before anybody sees the last of them.
SaveResponse = Callable[[ResponseBody, Sequence[bytes]], Awaitable[None]]
Diagnose = Callable[[int], CacheDiagnostics]
Item = dict[str, Any]


class ResponseTask:
    """`keep` is called once, when the response is settled, unless its client left before.

    items     all that the response is made from
    diagnose  the use of the cache explained, from the number of cached tokens; None where nobody asked
    """

    def __init__(
        self,
        turn: ChatTurn,
        writer: ResponseWriter,
        keep: SaveResponse,
        items: Sequence[Item] = (),
        diagnose: Diagnose | None = None,
    ) -> None:
        self._turn, self._writer, self._save, self._diagnose = turn, writer, keep, diagnose
        self.items = items
        self._frames: list[bytes] = []
        self._changed = asyncio.Event()
        self._admission = AsyncExitStack()
        self._task: asyncio.Task[None] | None = None
        self._cancelled = self._done = False
        self.error: ApiError | None = None

    @property
    def response(self) -> ResponseBody:
        """The response as it stands."""
        return self._writer.response

    @property
    def output(self) -> list[Item]:
        """The items of the answer so far."""
        return [dict(item) for item in self.response["output"]]

    @property
    def frames(self) -> Sequence[bytes]:
        """The events so far, as they go over the wire."""
        return self._frames

    async def start(self, opening: AbstractAsyncContextManager[ChoiceEvents]) -> None:
        """Start the work; raises what keeps the engine from taking it."""
        events = await self._admission.enter_async_context(opening)
        self._emit(self._writer.created())
        if self.response["status"] != "queued":
            self._emit(self._writer.in_progress())
        self._task = asyncio.create_task(self._work(events))

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """The events behind number `after`, until the last one."""
        at = after + 1
        while not self._done or at < len(self._frames):
            changed = self._changed
            if at < len(self._frames):
                yield b"".join(self._frames[at:])
                at = len(self._frames)
            else:
                await changed.wait()

    async def wait_finished(self) -> ResponseBody:
        """The response at its end; ApiError if it failed."""
        assert self._task is not None
        await asyncio.wait({self._task})
        if self.error is not None:
            raise self.error
        return self.response

    def add_done_callback(self, act: Callable[[], object]) -> None:
        """Call `act` when nothing is done on it any more, however it ended."""
        assert self._task is not None
        self._task.add_done_callback(lambda _: act())

    async def cancel(self) -> None:
        """End the work for good, and wait until that is kept."""
        self._cancelled = True
        await self.abort()

    async def abort(self) -> None:
        """End the work without a trace, because nobody waits for it. Without effect on what is done already."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
        # A task that was cancelled before its first step has not done this.
        await self._admission.aclose()

    async def _work(self, events: ChoiceEvents) -> None:
        try:
            async with self._admission:
                last = await self._final_events(events)
            frames = _encoded(last)
            try:
                await self._save(self.response, [*self._frames, *frames])
            except StoreError as error:
                logger.error("a response could not be kept: %s", error)
                frames = [*frames[:-1], *_encoded(self._writer.not_stored(NOT_STORED))]
            self._publish(frames)
        finally:
            self._done = True
            self._publish(())

    async def _final_events(self, events: ChoiceEvents) -> Iterable[ResponseEvent]:
        """Tell all events but the last ones, which are the answer: they are to be kept before they are told."""
        try:
            return await self._read_events(events)
        except (ApiError, EngineError) as error:
            return self._failure(renamed_error(error))
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            return list(self._writer.cancel())
        except Exception:
            # Nobody stands above this task: the border of the HTTP side is here.
            logger.exception("a response failed")
            return self._failure(internal_error())

    async def _read_events(self, events: ChoiceEvents) -> Iterable[ResponseEvent]:
        async with aclosing(parse_choices(self._turn, events)) as heard:
            async for _, what in heard:
                match what:
                    case Started() if self.response["status"] == "queued":
                        self._emit(self._writer.in_progress())
                    case ChoiceDelta():
                        self._emit(self._writer.add(what.deltas, self._logprobs(what)))
                    case ChoiceEnd():
                        check_deadline([what.finished])
                        return list(self._end(what))
        raise AssertionError("the engine ends every stream with Finished or Failed")

    def _end(self, ended: ChoiceEnd) -> Iterable[ResponseEvent]:
        usage = response_usage(ended.finished, ended.reasoning_tokens)
        diagnostics = self._diagnose and self._diagnose(ended.finished.usage.cached_tokens)
        return self._writer.finish("incomplete" if ended.reason == "length" else "completed", usage, diagnostics)

    def _failure(self, error: ApiError) -> Iterable[ResponseEvent]:
        self.error = error
        body: Any = error.body["error"]
        return list(self._writer.fail(body))

    def _logprobs(self, what: ChoiceDelta) -> Sequence[ChatLogprob]:
        return chat_logprobs(what.logprobs)["content"] if self._turn.body.logprobs else ()

    def _emit(self, events: Iterable[ResponseEvent]) -> None:
        self._publish(_encoded(events))

    def _publish(self, frames: Sequence[bytes]) -> None:
        self._frames.extend(frames)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _encoded(events: Iterable[ResponseEvent]) -> list[bytes]:
    return [named_frame(event) for event in events]


def response_usage(finished: Finished, reasoning: int) -> ResponseUsage:
    """The cost of one generation under the names of this API."""
    cost = finished.usage
    return ResponseUsage(
        input_tokens=cost.prompt_tokens,
        input_tokens_details={"cached_tokens": cost.cached_tokens, "cache_write_tokens": cache_write_tokens(finished)},
        output_tokens=cost.completion_tokens,
        output_tokens_details={"reasoning_tokens": reasoning},
        total_tokens=cost.prompt_tokens + cost.completion_tokens,
    )
