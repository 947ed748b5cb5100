"""From a request body to events: one or several generations of one answer, as one stream of (choice, event)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import TypeVar

import anyio.to_thread

from engine.types import Event, Rendering, Request, SamplingParams, SpeculationParams
from server.errors import INVALID_VALUE, ApiError
from server.metrics import Endpoint
from server.schemas.common import Generation
from server.schemas.content import text_of
from server.service import Service

Events = AsyncIterator[tuple[int, Event]]
Value = TypeVar("Value")


@asynccontextmanager
async def generate(service: Service, requests: Sequence[Request], endpoint: Endpoint) -> AsyncIterator[Events]:
    """Admit all requests or none, then pass their events on as they come. Leaving the block cancels what still runs."""
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(service.open(request, endpoint)) for request in requests]
        async with aclosing(_merge(streams)) as events:
            yield events


def sampling(body: Generation, vocabulary: int) -> SamplingParams:
    """How the body wants its tokens chosen; null is the default of OpenAI."""
    bias = tuple((int(token), value) for token, value in (body.logit_bias or {}).items())
    _check_ids("logit_bias", [token for token, _ in bias], vocabulary)
    return SamplingParams(
        temperature=_or(body.temperature, 1.0),
        top_k=max(_or(body.top_k, 0), 0),
        top_p=_or(body.top_p, 1.0),
        min_p=_or(body.min_p, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=bias,
        seed=body.seed,
    )


async def prediction(service: Service, body: Generation) -> tuple[int, ...]:
    """The tokens that the client expects; raises what is wrong with its text."""
    if body.prediction is None:
        return ()
    text = text_of(body.prediction.content, "")
    return tuple(await anyio.to_thread.run_sync(service.engine.tokenizer.predict, text))


def request(
    service: Service,
    body: Generation,
    prompt: Rendering,
    *,
    id: str,
    max_tokens: int | None,
    logprobs: int | None,
    prediction: tuple[int, ...],
) -> Request:
    """The engine's request for one prompt of the body. ApiError at token ids that the model does not have."""
    info = service.engine.info
    if body.stream_options is not None and not body.stream:
        message = "Invalid value for 'stream_options': it means nothing unless 'stream' is true."
        raise ApiError(INVALID_VALUE, message, param="stream_options")
    _check_ids("prompt", prompt.tokens, info.vocabulary)
    _check_ids("stop_token_ids", body.stop_token_ids or (), info.vocabulary)
    overflow = body.overflow or service.settings.overflow
    if max_tokens is not None and max_tokens > info.context and overflow != "shift":
        message = f"Invalid value for 'max_tokens': the context of this model holds {info.context} tokens."
        raise ApiError(INVALID_VALUE, message, param="max_tokens")
    return Request(
        id=id,
        prompt=prompt.tokens,
        sampling=sampling(body, info.vocabulary),
        max_tokens=max_tokens,
        stop=tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        overflow=body.overflow,
        keep=prompt.keep if body.keep is None else body.keep,
        protected=prompt.protected,
        recurrent_shift=body.recurrent_shift or "rebuild",
        marks=prompt.marks,
        salt=_salt(body.cache_salt),
        speculation=_speculation(body),
        prediction=prediction,
    )


async def _merge(streams: Sequence[AsyncIterator[Event]]) -> AsyncGenerator[tuple[int, Event], None]:
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    waiting = {_next(stream): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                following = task.result()
                if following is not None:
                    waiting[_next(streams[index])] = index
                    yield index, following
    finally:
        await _cancel(waiting)


def _next(stream: AsyncIterator[Event]) -> asyncio.Task[Event | None]:
    async def following() -> Event | None:
        return await anext(stream, None)

    return asyncio.create_task(following())


async def _cancel(tasks: dict[asyncio.Task[Event | None], int]) -> None:
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)


def _speculation(body: Generation) -> SpeculationParams:
    asked = body.speculation
    return SpeculationParams() if asked is None else SpeculationParams(asked.drafter or "auto", asked.tokens)


def _salt(text: str | None) -> bytes:
    # As a digest: what tells tenants apart may be a secret, and the cache writes salts to disk.
    return b"" if text is None else hashlib.sha256(text.encode()).digest()


def _check_ids(field: str, ids: Sequence[int], vocabulary: int) -> None:
    worst = max(ids, default=0)
    if worst >= vocabulary:
        message = f"Invalid value for '{field}': this model has {vocabulary} tokens, there is no id {worst}."
        raise ApiError(INVALID_VALUE, message, param=field)


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value
