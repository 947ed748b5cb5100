"""The service of the Responses API: creates, reads, cancels, deletes and compacts responses."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import anyio.to_thread

from engine.errors import EngineError, Overloaded
from engine.types.status import Stats
from server.generation.chat_turn import ChatTurn, prepare_chat
from server.generation.completed_message import collect_messages
from server.generation.requests import generate
from server.http.errors import (
    INVALID_VALUE,
    RESPONSE_NOT_FOUND,
    UNSUPPORTED_VALUE,
    ApiError,
    invalid_value,
    missing_parameter,
)
from server.http.events import ChoiceEvents
from server.http.key_limits import hold_open
from server.media.uploads import MediaReader
from server.models.registry import ModelRegistry
from server.responses.archive import (
    NOT_STORED,
    Archive,
    ForkSource,
    Item,
    as_items,
    check_call_outputs,
    failed_response,
    files_of,
    parse_items,
    previous_not_found,
    stored_item,
)
from server.responses.cache_diagnostics import compare
from server.responses.compaction import SUMMARY_QUESTION, compaction, summary_request
from server.responses.fork import OutputTokens, checked_count, continued, ended_after, first_items, with_prompt_of
from server.responses.initial import initial_response, prompt_of_response
from server.responses.messages import LatestResponse
from server.responses.partial_items import new_id
from server.responses.task import Diagnose, ResponseTask
from server.responses.translation import chat_request, client_warnings, renamed_error
from server.responses.truncation import fitting_turn
from server.responses.writer import FINAL_STATUSES, ResponseWriter
from server.schemas.response_input import MAX_ITEMS, ReferenceInput
from server.schemas.response_items import Compaction, ResponseBody
from server.schemas.responses import CompactRequest, PromptFields, ResponseRequest
from server.store.database import StoreError
from server.store.store import LEASE_SECONDS, ResponseStore

logger = logging.getLogger("cellar.http")


class ResponseService:
    """All responses of one app. Without a store no response outlives its request."""

    def __init__(self, models: ModelRegistry, store: ResponseStore | None) -> None:
        self._models, self._store, self._owner = models, store, ""
        self._archive = None if store is None else Archive(store)
        # By owner and response id.
        self._running: dict[tuple[str, str], ResponseTask] = {}
        self._renewals: set[asyncio.Task[None]] = set()

    def for_owner(self, owner: str) -> ResponseService:
        """The service for one owner, without access to responses of other owners."""
        service = copy.copy(self)
        service._owner = owner
        service._archive = None if self._store is None else Archive(self._store, owner)
        return service

    def loaded(self, model: str | None) -> AbstractAsyncContextManager[None]:
        """Inside the block the model is loaded: outside a HTTP request nothing else loads it."""
        return self._models.loaded(model)

    async def create(
        self, body: ResponseRequest, warnings: Sequence[str] = (), latest: LatestResponse | None = None
    ) -> ResponseTask:
        """Start a response. ApiError or EngineError for an invalid request, before anything is computed.

        warnings  of fields left out of the request, for the response
        latest    a response outside the store that this one may continue
        """
        self._check(body)
        body, input_items, output = await self._forked(body)
        items = await self._prompt_items(body, input_items, latest)
        # The generation has its own lease, as it may outlive the request.
        with self._models.lease(body.model) as service:
            turn = await self._turn(body, items, new_id("resp"))
            if output is not None and body.continue_from is not None:
                vocabulary = service.engine.info.vocabulary
                turn = continued(turn, output, body.continue_from.token_count, vocabulary)
            response = initial_response(body, turn, stored=body.stored and self._archive is not None)
            if all_warnings := [*warnings, *client_warnings(turn.warnings)]:
                response["warnings"] = all_warnings
            if response["store"]:
                input_items = await _with_files(input_items, service.media)
            writer = ResponseWriter(response, encrypted=body.includes("reasoning.encrypted_content"))
            diagnose = await self._diagnose(body.compared, response, turn)
            task = ResponseTask(turn, writer, partial(self._store_final, body, turn, input_items), items, diagnose)
            await self._start(task, turn, input_items, service.engine.stats())
        return task

    async def count(self, body: PromptFields) -> int:
        """The number of tokens of a request's prompt."""
        items = await self._prompt_items(body, await self._input_items(body))
        return len((await self._turn(body, items, new_id("resp"))).requests[0].prompt)

    async def compact(self, body: CompactRequest) -> Compaction:
        """Replace a conversation by a summary of the model; nothing is stored."""
        items = await self._prompt_items(body, await self._input_items(body))
        if not items:
            raise missing_parameter("input")
        with self._models.lease(body.model) as service:
            summary = summary_request(body, service.engine.info.context)
            turn = await self._turn(summary, [*items, SUMMARY_QUESTION], new_id("resp"))
            try:
                async with generate(service, turn.requests, "responses") as events:
                    [reply] = await collect_messages(turn, events)
            except EngineError as error:
                raise renamed_error(error) from error
        return compaction(turn, items, reply)

    def running(self, id: str) -> ResponseTask | None:
        """The task of a response that this process generates."""
        return self._running.get((self._owner, id))

    async def response(self, id: str) -> ResponseBody:
        """The current state of a response; ApiError if there is none."""
        task = self.running(id)
        stored = await self._required_archive.response(id) if task is None else task.response
        if stored is None:
            raise _not_found(id)
        return stored

    async def frames(self, id: str) -> list[bytes]:
        """The event frames of a final response; ApiError if there is none."""
        response = await self.response(id)
        if response["status"] not in FINAL_STATUSES:
            message = f"Response with id '{id}' is in progress on another server and can only be streamed there."
            raise ApiError(INVALID_VALUE, message, param="stream")
        return await self._required_archive.frames(id)

    async def input_items(self, id: str) -> list[Item]:
        """All items in front of a response's output, oldest first; ApiError if there is none."""
        stored = await self._required_archive.input_items(id)
        if stored is None:
            raise _not_found(id)
        return stored

    async def cancel(self, id: str) -> ResponseBody:
        """Cancel a background response; a final one is returned unchanged."""
        response = await self.response(id)
        if not response["background"]:
            message = f"Response with id '{id}' cannot be cancelled: it was not created with background=true."
            raise ApiError(INVALID_VALUE, message)
        task = self.running(id)
        if task is not None:
            await task.cancel()
            return task.response
        # Another server may generate it; its next lease renewal finds the cancellation.
        return await self._required_archive.cancel(id) or response

    async def delete(self, id: str) -> None:
        """Delete a response and cancel its generation; ApiError if there is none."""
        task = self.running(id)
        if task is not None:
            await task.cancel()
        if not await self._required_archive.delete(id):
            raise _not_found(id)

    async def close(self) -> None:
        """Abort all tasks and close the store."""
        for renewal in self._renewals:
            renewal.cancel()
        for task in list(self._running.values()):
            await task.abort()
        if self._store is not None:
            self._store.close()

    @property
    def _required_archive(self) -> Archive:
        if self._archive is None:
            raise ApiError(RESPONSE_NOT_FOUND, "This server stores no responses; see --store.")
        return self._archive

    def _check(self, body: ResponseRequest) -> None:
        if body.stream_options is not None and not body.stream:
            raise invalid_value("stream_options", "it needs 'stream' to be true")
        if body.background and not body.stored:
            raise invalid_value("background", "it needs 'store', since the response could not be read otherwise")
        if self._archive is None and (body.store or body.background):
            name = "store" if body.store else "background"
            message = f"Invalid value for '{name}': this server stores no responses; see --store."
            raise ApiError(UNSUPPORTED_VALUE, message, param=name)

    async def _forked(self, body: ResponseRequest) -> tuple[ResponseRequest, list[Item], OutputTokens | None]:
        """The request with the prompt of the response that it continues, if it does; the input items; and the tokens
        that the answer continues, unless further input follows them.
        """
        new_items = await self._input_items(body)
        if body.continue_from is None:
            return body, new_items, None
        source = await self._required_archive.fork_source(body.continue_from.response_id)
        if source is None:
            raise _not_found(body.continue_from.response_id)
        count = checked_count(body, source.output)
        assert source.output is not None
        request = with_prompt_of(body, source.response, source.output)
        if body.input is None:
            return request, source.input_items, source.output
        kept = await self._first_output(request, source, count)
        items = [*source.input_items, *kept, *new_items]
        check_call_outputs(items)
        return request, items, None

    async def _first_output(self, body: ResponseRequest, source: ForkSource, count: int) -> list[Item]:
        """The output items of the first `count` tokens of a response. Nothing is computed for them."""
        if not count:
            return []
        items = await self._prompt_items(body, source.input_items)
        with self._models.lease(body.model) as service:
            turn = await self._turn(body, items, new_id("resp"))
            assert source.output is not None
            turn = ended_after(continued(turn, source.output, count, service.engine.info.vocabulary), count)
            writer = ResponseWriter(initial_response(body, turn, stored=False))
            task = ResponseTask(turn, writer, _store_nothing)
            await task.start(self._generate(turn))
            return first_items(await task.wait_finished(), source.response)

    async def _input_items(self, body: PromptFields | CompactRequest) -> list[Item]:
        """The stored input items of a request."""
        items = as_items(body.input)
        if any(isinstance(item, ReferenceInput) for item in items):
            return await self._required_archive.resolve_references(items)
        return await anyio.to_thread.run_sync(lambda: [stored_item(item) for item in items])

    async def _prompt_items(
        self, body: PromptFields | CompactRequest, input_items: Sequence[Item], latest: LatestResponse | None = None
    ) -> list[Item]:
        """All items of the prompt: the conversation history and the request's input."""
        before = await self._previous_items(body.previous_response_id, latest)
        if len(before) + len(input_items) > MAX_ITEMS:
            raise invalid_value("input", f"with the conversation history it has more than {MAX_ITEMS} items")
        items = [*before, *input_items]
        if body.previous_response_id is not None:
            check_call_outputs(items)
        return items

    async def _previous_items(self, previous: str | None, latest: LatestResponse | None) -> list[Item]:
        if previous is None:
            return []
        if latest is not None and previous == latest.id:
            return list(latest.items)
        # On a WebSocket OpenAI returns the same error with and without a store.
        if self._archive is None and latest is not None:
            raise previous_not_found(previous)
        return await self._required_archive.history(previous)

    async def _turn(self, body: PromptFields, items: Sequence[Item], id: str) -> ChatTurn:
        history = len(items) - len(as_items(body.input))
        try:
            with self._models.lease(body.model) as service:
                chat = await anyio.to_thread.run_sync(
                    lambda: chat_request(body, service.name, parse_items(items), history)
                )
                make = fitting_turn if body.truncation == "auto" else prepare_chat
                return await make(service, chat, id)
        except (ApiError, EngineError) as error:
            raise renamed_error(error) from error

    async def _diagnose(self, compared: str | None, response: ResponseBody, turn: ChatTurn) -> Diagnose | None:
        """The cache diagnostics by comparison with an earlier response, if the request asks for one."""
        if compared is None:
            return None
        earlier = None if self._archive is None else await self._archive.response(compared)
        if earlier is None:
            return lambda cached: {"type": "comparison_response_not_found"}
        try:
            old = await self._turn(
                prompt_of_response(earlier), await self._required_archive.input_items(compared) or [], new_id("resp")
            )
        except (ApiError, EngineError):
            return lambda cached: {"type": "unavailable"}
        return compare(earlier, old.requests[0].prompt, response, turn.requests[0].prompt).verdict

    async def _start(self, task: ResponseTask, turn: ChatTurn, input_items: Sequence[Item], stats: Stats) -> None:
        background = task.response["background"]
        if background:
            self._check_background_capacity(stats)
        store = partial(self._store_started, task, input_items) if background else None
        try:
            await task.start(self._generate(turn), store)
        except EngineError as error:
            raise renamed_error(error) from error
        id = task.response["id"]
        if task.response["store"]:
            self._running[self._owner, id] = task
            task.add_done_callback(lambda: self._running.pop((self._owner, id), None))
        if background:
            task.add_done_callback(hold_open())
            self._start_renewal(task)

    @asynccontextmanager
    async def _generate(self, turn: ChatTurn) -> AsyncGenerator[ChoiceEvents, None]:
        with self._models.lease(turn.model) as service:
            async with generate(service, turn.requests, "responses") as events:
                yield events

    async def _store_started(self, task: ResponseTask, input_items: Sequence[Item]) -> None:
        """Store a response in the background as queued: without that it could not be read later."""
        await self._required_archive.save(task.response, input_items, (), final=False)

    def _check_background_capacity(self, stats: Stats) -> None:
        """Limit background responses to half of the queue.

        Above the limit, an owner with less than an even share of that half is still admitted. The predicted wait is
        that for the end of any request of the model, which may not be one in the background.
        """
        owners = [owner for (owner, _), task in self._running.items() if task.response["background"]]
        limit = max(self._models.settings.max_waiting // 2, 1)
        share = limit // len({*owners, self._owner})
        if len(owners) >= limit and owners.count(self._owner) >= share:
            raise Overloaded(len(owners), stats.free_place_seconds)

    async def _store_final(
        self,
        body: ResponseRequest,
        turn: ChatTurn,
        input_items: Sequence[Item],
        response: ResponseBody,
        frames: Sequence[bytes],
        tokens: Sequence[int],
    ) -> None:
        if not response["store"]:
            return
        # One in the background is stored since its start, unless it was deleted.
        save = partial(self._required_archive.save, final=True, new=not response["background"])
        try:
            await save(response, input_items, frames, output=OutputTokens.of(body, turn, tokens))
        except StoreError:
            if response["background"]:
                # A failed response needs less space than a whole answer.
                await save(failed_response(response, NOT_STORED), input_items, ())
            raise

    def _start_renewal(self, task: ResponseTask) -> None:
        renewal = asyncio.create_task(self._renew_lease(task))
        self._renewals.add(renewal)
        renewal.add_done_callback(self._renewals.discard)

    async def _renew_lease(self, task: ResponseTask) -> None:
        """Renew the lease of a background response until it is final."""
        id = task.response["id"]
        while self.running(id) is not None:
            await asyncio.sleep(LEASE_SECONDS / 3)
            try:
                if self.running(id) is not None and not await self._required_archive.renew_lease(id):
                    await task.cancel()
            except StoreError:
                logger.exception("the lease of a response could not be renewed")


def _not_found(id: str) -> ApiError:
    return ApiError(RESPONSE_NOT_FOUND, f"Response with id '{id[:128]}' not found.")


async def _store_nothing(response: ResponseBody, frames: Sequence[bytes], tokens: Sequence[int]) -> None:
    """The response is part of another one."""


async def _with_files(items: Sequence[Item], media: MediaReader) -> list[Item]:
    """The items with files of the owner in place of inline images and sounds."""
    return [
        {**item, **{name: await files_of(item[name], media) for name in ("content", "output") if name in item}}
        for item in items
    ]
