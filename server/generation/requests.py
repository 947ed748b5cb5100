"""Engine requests of a body, and the merged event stream of its choices."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial

import anyio.to_thread

from engine.types.events import Event
from engine.types.request import Overflow, RenderedPrompt, Request, SpeculationParams, Tier
from server.generation.continuation import emitted_tokens, is_resumable
from server.generation.sampling import check_token_ids, sampling
from server.http.auth import caller
from server.http.errors import invalid_value
from server.http.events import ChoiceEvents, DeltaSink
from server.metrics.metrics import Endpoint
from server.schemas.common import Generation
from server.schemas.content import text_of
from server.service import Service


@asynccontextmanager
async def generate(service: Service, requests: Sequence[Request], endpoint: Endpoint) -> AsyncIterator[ChoiceEvents]:
    """Admit all requests or none, then yield their events. Leaving the block cancels running requests."""
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(service.open(request, endpoint, choice))
            for choice, request in enumerate(requests)
        ]
        if len(streams) == 1:
            yield streams[0]
            return
        async with aclosing(_merge(streams)) as reading:
            yield ChoiceEvents(reading, partial(_set_sinks, streams))


async def prediction_tokens(service: Service, body: Generation) -> tuple[int, ...]:
    """Tokens of the predicted output (`prediction`); ApiError if its content is invalid."""
    if body.prediction is None:
        return ()
    text = text_of(body.prediction.content, "")
    return tuple(await anyio.to_thread.run_sync(service.engine.tokenizer.encode_prediction, text))


async def engine_request(
    service: Service, body: Generation, prompt: RenderedPrompt, *, id: str, max_tokens: int | None, logprobs: int | None
) -> Request:
    """The engine request for one prompt of the body, without fields that only one API has.

    ApiError for contradictory parameters, and for token ids outside the vocabulary.
    """
    info = service.engine.info
    if _exceeds_context(service, body, max_tokens):
        max_tokens = info.context
    if max_tokens is None and info.default_max_tokens is not None:
        max_tokens = max(info.default_max_tokens, body.min_tokens or 0)
    _check(body, info.context, max_tokens, body.overflow or service.settings.overflow)
    check_token_ids("prompt", prompt.tokens, info.vocabulary)
    check_token_ids("stop_token_ids", body.stop_token_ids or (), info.vocabulary)
    check_token_ids("logprob_token_ids", body.logprob_token_ids or (), info.vocabulary)
    keep = body.n_keep if body.keep is None else body.keep
    return Request(
        id=id,
        prompt=prompt.tokens,
        sampling=await sampling(service, body),
        max_tokens=max_tokens,
        stop=tuple(body.stop or ()),
        stop_regex=tuple(body.stop_regex or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=_optional_max(logprobs, body.prompt_logprobs),
        overflow=body.overflow,
        keep=prompt.keep if keep is None else keep,
        protected=prompt.protected,
        recurrent_shift=body.recurrent_shift or "rebuild",
        checkpoints=prompt.checkpoints,
        contents=prompt.contents,
        salt=_salt(body),
        cacheable=body.cache_prompt is not False,
        speculation=_speculation(body),
        prediction=await prediction_tokens(service, body),
        min_tokens=body.min_tokens or 0,
        include_special_tokens=body.skip_special_tokens is False,
        score_from=None if body.prompt_logprobs is None else 0,
        label_tokens=tuple(body.logprob_token_ids or ()),
        tier=service_tier(body),
        timeout_seconds=body.timeout,
        progress=bool(body.return_progress),
        emitted=emitted_tokens(body, info.vocabulary, max_tokens),
        tokens_at_once=is_resumable(body),
    )


def limit_warnings(service: Service, body: Generation, field: str, max_tokens: int | None) -> tuple[str, ...]:
    """The warning of an answer that is limited to the context, because `field` asks for more."""
    if not _exceeds_context(service, body, max_tokens):
        return ()
    return (f"'{field}' is {max_tokens}: the answer ends at the context of {service.engine.info.context} tokens.",)


def truncated_prompt(
    service: Service, body: Generation, prompt: RenderedPrompt, max_tokens: int | None
) -> RenderedPrompt:
    """The last `truncate_prompt_tokens` tokens of a prompt; -1: as many as leave room for the answer."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return prompt
    if limit == -1:
        is_limited = max_tokens is not None and not _exceeds_context(service, body, max_tokens)
        limit = max(service.engine.info.context - (max_tokens or 0 if is_limited else 1), 1)
    removed = len(prompt.tokens) - limit
    if removed <= 0:
        return prompt
    if any(content.start < removed < content.stop for content in prompt.contents):
        raise invalid_value("truncate_prompt_tokens", f"{limit} tokens begin inside an image or a sound")
    return RenderedPrompt(
        prompt.tokens[removed:],
        checkpoints=tuple(checkpoint - removed for checkpoint in prompt.checkpoints if checkpoint > removed),
        protected=tuple(
            (max(start - removed, 0), stop - removed) for start, stop in prompt.protected if stop > removed
        ),
        generation_prompt=prompt.generation_prompt,
        contents=tuple(
            replace(content, start=content.start - removed, stop=content.stop - removed)
            for content in prompt.contents
            if content.start >= removed
        ),
    )


def choice_requests(request: Request, choices: int) -> tuple[Request, ...]:
    """One request per choice of a prompt. The prompt is computed once, and scored for the first choice."""
    if choices == 1:
        return (request,)
    return tuple(
        replace(
            request,
            id=f"{request.id}-{choice}",
            sampling=replace(request.sampling, seed=_choice_seed(request.sampling.seed, choice)),
            score_from=None if choice else request.score_from,
            progress=request.progress and not choice,
        )
        for choice in range(choices)
    )


def check_capacity(service: Service, requests: Sequence[Request]) -> None:
    """ApiError if an answer has more choices than slots and queue can hold, so that waiting cannot help."""
    limit = service.engine.info.slots + service.settings.max_waiting
    if len(requests) > limit:
        raise invalid_value("n", f"{len(requests)} choices are requested, and this server runs at most {limit} at once")


def service_tier(body: Generation) -> Tier:
    """Tier by OpenAI's `service_tier` or vLLM's `priority`, where lower numbers are more urgent; "flex" in a batch."""
    if caller().batch:
        return "flex"
    match body.service_tier:
        case "priority" | "fast":
            return "priority"
        case "flex":
            return "flex"
        case "default":
            return "default"
    urgency = body.priority or 0
    return "priority" if urgency < 0 else "flex" if urgency > 0 else "default"


def _check(body: Generation, context: int, max_tokens: int | None, overflow: Overflow) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid_value("stream_options", "it needs 'stream' to be true")
    if body.return_progress and not body.stream:
        raise invalid_value("return_progress", "it needs 'stream' to be true")
    if body.stream_interval is not None and not body.stream:
        raise invalid_value("stream_interval", "it needs 'stream' to be true")
    if body.timings_per_token and not body.stream:
        raise invalid_value("timings_per_token", "it needs 'stream' to be true")
    if body.min_tokens and max_tokens is not None and body.min_tokens > max_tokens:
        raise invalid_value("min_tokens", f"the answer has {max_tokens} tokens at most")
    if body.priority and body.service_tier is not None:
        raise invalid_value("priority", "it conflicts with 'service_tier'; give one of them")
    if body.keep is not None and body.n_keep is not None and body.keep != body.n_keep:
        raise invalid_value("n_keep", "it is an alias of 'keep' with another value")
    keep = body.n_keep if body.keep is None else body.keep
    if keep is not None and keep > context // 2 and overflow == "shift":
        name = "n_keep" if body.keep is None else "keep"
        raise invalid_value(name, f"a context shift keeps at most half of the context, {context // 2} tokens")


def _exceeds_context(service: Service, body: Generation, max_tokens: int | None) -> bool:
    overflow = body.overflow or service.settings.overflow
    return max_tokens is not None and max_tokens > service.engine.info.context and overflow != "shift"


def _optional_max(*counts: int | None) -> int | None:
    return max((count for count in counts if count is not None), default=None)


def _choice_seed(seed: int | None, choice: int) -> int | None:
    # Wraps around in the range of 64-bit seeds.
    return None if seed is None else (seed + choice + 2**63) % 2**64 - 2**63


async def _merge(streams: Sequence[ChoiceEvents]) -> AsyncGenerator[tuple[int, Event], None]:
    waiting = {_next(stream): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                event = task.result()
                if event is not None:
                    yield event
                    # After the event is consumed: deltas on the fast path of the same stream must not overtake it.
                    waiting[_next(streams[index])] = index
    finally:
        await _cancel(waiting)


def _set_sinks(streams: Sequence[ChoiceEvents], sink: DeltaSink) -> None:
    for stream in streams:
        stream.set_sink(sink)


def _next(stream: ChoiceEvents) -> asyncio.Task[tuple[int, Event] | None]:
    async def next_event() -> tuple[int, Event] | None:
        return await anext(stream.iterator, None)

    return asyncio.create_task(next_event())


async def _cancel(tasks: dict[asyncio.Task[tuple[int, Event] | None], int]) -> None:
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)


def _speculation(body: Generation) -> SpeculationParams:
    options = body.speculation
    return SpeculationParams() if options is None else SpeculationParams(options.drafter or "auto", options.tokens)


def _salt(body: Generation) -> bytes:
    if body.cache_prompt is False:
        # A random salt: no other request finds the cached prefix, and this one finds none.
        return secrets.token_bytes(32)
    # A digest, because the salt may be a secret and the cache writes salts to disk.
    return b"" if body.cache_salt is None else hashlib.sha256(body.cache_salt.encode()).digest()
