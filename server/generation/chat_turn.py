"""One chat completion, as all chat APIs run it.

Each API translates its body into a `ChatRequest`, prepares a `ChatTurn` from it (`prepare_chat`), runs the turn's
requests (`requests.generate`), and parses the events into deltas of text, reasoning and tool calls (`parse_choices`).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import anyio.to_thread

from engine.chat_format.chat_format import AnswerParser, ChatFormat
from engine.chat_format.message import AnswerDelta, ReasoningDelta, TextDelta, ToolCallStart
from engine.types.content import Upload
from engine.types.events import Delta, Event, Finished, PrefillProgress, PromptScored, Started, TokenLogprob
from engine.types.request import ReasoningLimit, RenderedPrompt, Request
from server.generation.grammar import answer_grammar
from server.generation.messages import ROLES, PreparedMessages, has_breakpoints, placed_parts, prepare_messages
from server.generation.reasoning import SentField
from server.generation.requests import check_capacity, choice_requests, engine_request, limit_warnings, truncated_prompt
from server.generation.support import SupportedRequest, supported_request
from server.generation.tools import ToolSet
from server.http.errors import UNSUPPORTED_VALUE, ApiError, invalid_value, unsupported_parameter
from server.http.events import MAX_INLINE_DELTAS, ChoiceEvents, is_long
from server.media.threads import MediaThreads, run_in_thread
from server.schemas.chat import ChatRequest
from server.service import Service

Messages = Sequence[Mapping[str, object]]
Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class MessageLocator:
    """Finds the message that a token of a prompt belongs to.

    Only the chat template defines where messages are in the prompt. The start of a message is found by rendering the
    messages with a changed first character and comparing the tokens; the message of a token by bisection.

    render   tokens of messages, rendered as `prompt` was; runs in worker threads
    threads  of requests with images or sounds; None: those of all requests
    """

    messages: Messages
    prompt: tuple[int, ...]
    render: Callable[[Messages], Sequence[int]]
    threads: MediaThreads | None = None

    async def message_at(self, token: int) -> int | None:
        """Index of the message that contains or precedes a token; None: before the text of the first message."""
        return await run_in_thread(self.threads, lambda: self._message(token))

    def _message(self, token: int) -> int | None:
        following = bisect_right(range(len(self.messages)), token, key=self._start)
        return following - 1 if following else None

    def _start(self, index: int) -> int:
        """The first token of a message's text."""
        changed = {**self.messages[index], "content": _with_other_start(self.messages[index]["content"])}
        other = self.render([*self.messages[:index], changed, *self.messages[index + 1 :]])
        pairs = zip(self.prompt, other, strict=False)
        return next(
            (place for place, (token, changed_token) in enumerate(pairs) if token != changed_token), len(self.prompt)
        )


def _with_other_start(content: object) -> object:
    """The content of a message with another first character."""
    if isinstance(content, list):
        return [{"type": "text", "text": "+"}, *content]
    text = str(content)
    return ("+" if text.startswith("-") else "-") + text


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """Deltas of one choice, with the tokens and log-probabilities of the text that they were parsed from."""

    deltas: tuple[AnswerDelta, ...]
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class EarlierDelta:
    """A delta that the client has already, of an answer that is continued."""

    delta: ChoiceDelta


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """The end of one choice; its reason is "tool_calls" if it has tool calls and was not truncated."""

    reason: Reason
    finished: Finished
    reasoning_tokens: int


ChoiceEvent = ChoiceDelta | EarlierDelta | ChoiceEnd | Started | PrefillProgress | PromptScored


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A validated and rendered chat request.

    requests           one per choice, with the same prompt
    message_locator    finds messages in the prompt
    cache_bypassed     whether the request does not use the prefix cache
    generation_prompt  the template's text after the last message
    warnings           ignored parameters, and parts of schemas that are not enforced
    """

    id: str
    created: int
    model: str
    fingerprint: str
    body: ChatRequest
    requests: tuple[Request, ...]
    chat_format: ChatFormat
    message_locator: MessageLocator
    cache_bypassed: bool = False
    tool_set: ToolSet = field(default_factory=ToolSet)
    include_reasoning: bool = True
    generation_prompt: str = ""
    warnings: tuple[str, ...] = ()

    def answer_parser(self) -> AnswerParser:
        """A parser of one choice."""
        return self.chat_format.parser(self.tool_set.tools, self.generation_prompt)

    def call_id(self, choice: int, index: int) -> str:
        """The id of tool call number `index`; deterministic."""
        # Derived from the engine's request id: clients may choose the answer's own id, and repeat it.
        engine_id = self.requests[0].id
        return f"call_{hashlib.sha256(f'{engine_id}/{choice}/{index}'.encode()).hexdigest()[:24]}"


async def prepare_chat(service: Service, body: ChatRequest, id: str) -> ChatTurn:
    """Validate and render a body; raises ApiError or EngineError before anything runs."""
    service.check_ready()
    _check(body)
    uploads = await service.media.read(placed_parts(body.messages), service.name, service.engine.info)
    threads = service.threads.media if uploads else None
    supported, prepared, render, rendered = await run_in_thread(threads, lambda: _rendered(service, body, uploads))
    chat_format = service.engine.tokenizer.chat_format
    prompt = truncated_prompt(service, body, rendered, _max_tokens(body))
    compiled = await answer_grammar(service, body, chat_format, supported.tool_set, prompt.generation_prompt)
    single = await _request(service, body, prompt, supported.reasoning.budget, id)
    requests = choice_requests(replace(single, grammar=compiled.grammar), body.n or 1)
    check_capacity(service, requests)
    return ChatTurn(
        id=id if body.request_id is None else f"chatcmpl-{body.request_id}",
        created=int(time.time()),
        model=service.name,
        fingerprint=service.fingerprint(),
        body=body,
        requests=requests,
        chat_format=chat_format,
        message_locator=MessageLocator(
            prepared.messages, prompt.tokens, lambda messages: render(messages).tokens, threads
        ),
        cache_bypassed=_with_cache_mode(body).cache_prompt is False,
        tool_set=supported.tool_set,
        include_reasoning=supported.reasoning.included,
        generation_prompt=prompt.generation_prompt,
        warnings=(
            *limit_warnings(service, body, _limit_field(body), _max_tokens(body)),
            *supported.warnings,
            *(error.message for error in supported.missing),
            *compiled.warnings,
        ),
    )


async def parse_choices(turn: ChatTurn, events: ChoiceEvents) -> AsyncGenerator[tuple[int, ChoiceEvent], None]:
    """Parse the events of all choices."""
    parsers = [ChoiceParser(turn) for _ in turn.requests]
    async for choice, event in events:
        parse = parsers[choice].parse
        parsed = await anyio.to_thread.run_sync(parse, event) if is_long(event) else parse(event)
        for number, choice_event in enumerate(parsed, start=1):
            yield choice, choice_event
            if number % MAX_INLINE_DELTAS == 0:
                await asyncio.sleep(0)


class ChoiceParser:
    """Parses the events of one choice into choice events; the last one is a ChoiceEnd."""

    def __init__(self, turn: ChatTurn) -> None:
        self._parser = turn.answer_parser()
        self._include_reasoning = turn.include_reasoning
        # A match of a stop expression is part of the text already.
        self._shown_stops = frozenset(turn.body.stop or ()) if turn.body.include_stop_str_in_output else frozenset()
        self._called = False
        self._reasoning_tokens = 0.0
        # Tokens without a delta yet, such as tokens of a marker: they count with the next delta.
        self._pending = 0

    def parse(self, event: Event) -> Sequence[ChoiceEvent]:
        """Choice events of an engine event."""
        match event:
            case Delta():
                return (self._parsed(event),)
            case Finished():
                deltas, end = self._flush(event), self._end(event)
                return (ChoiceDelta(deltas), end) if deltas else (end,)
            case Started():
                return (event, *(EarlierDelta(self._parsed(delta)) for delta in event.earlier))
            case PrefillProgress() | PromptScored():
                return (event,)
        return ()

    def _parsed(self, delta: Delta) -> ChoiceDelta:
        self._pending += len(delta.tokens)
        return ChoiceDelta(self._shown(self._parser.push(delta.text)), delta.tokens, delta.logprobs)

    def _flush(self, finished: Finished) -> tuple[AnswerDelta, ...]:
        """Deltas that were held back until the end."""
        ending = finished.stop if finished.stop in self._shown_stops and finished.reason == "stop" else None
        close = self._parser.cut if finished.reason == "length" else self._parser.finish
        return self._shown([*(self._parser.push(ending) if isinstance(ending, str) else ()), *close()])

    def _end(self, finished: Finished) -> ChoiceEnd:
        reason: Reason = "tool_calls" if self._called and finished.reason == "stop" else finished.reason
        return ChoiceEnd(reason, finished, round(self._reasoning_tokens))

    def _shown(self, deltas: Sequence[AnswerDelta]) -> tuple[AnswerDelta, ...]:
        """The deltas that the client gets; all of them count."""
        match deltas:
            case []:
                return ()
            case [TextDelta() as text]:
                # The common case needs no counting.
                self._pending = 0
                return (text,)
        self._count(deltas)
        return tuple(delta for delta in deltas if self._include_reasoning or not isinstance(delta, ReasoningDelta))

    def _count(self, deltas: Sequence[AnswerDelta]) -> None:
        """Count reasoning tokens; tokens of mixed deltas are divided in proportion to characters."""
        self._called = self._called or any(isinstance(delta, ToolCallStart) for delta in deltas)
        lengths = [0 if isinstance(delta, ToolCallStart) else len(delta.text) for delta in deltas]
        reasoning_length = sum(
            size for delta, size in zip(deltas, lengths, strict=True) if isinstance(delta, ReasoningDelta)
        )
        self._reasoning_tokens += self._pending * reasoning_length / max(sum(lengths), 1)
        self._pending = 0


def _check(body: ChatRequest) -> None:
    for field_, needed in (("top_logprobs", body.top_logprobs), ("logprob_token_ids", body.logprob_token_ids)):
        if needed and not body.logprobs:
            raise invalid_value(field_, "it needs 'logprobs' to be true")
    if body.return_cache_diagnostics and body.truncate_prompt_tokens is not None:
        raise invalid_value("return_cache_diagnostics", "it cannot be combined with 'truncate_prompt_tokens'")
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid_value("add_generation_prompt", "it cannot be true together with 'continue_final_message'")
    if body.continue_final_message and body.messages[-1].role != "assistant":
        raise invalid_value("continue_final_message", "the last message is not one of the assistant")


def _max_tokens(body: ChatRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid_value("max_tokens", "it differs from 'max_completion_tokens'; give one of them")
    return old if new is None else new


def _limit_field(body: ChatRequest) -> str:
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


def _rendered(
    service: Service, body: ChatRequest, uploads: tuple[Upload, ...]
) -> tuple[SupportedRequest, PreparedMessages, Callable[[Messages], RenderedPrompt], RenderedPrompt]:
    """The supported part of a body, its messages, their renderer, and the prompt; for a worker thread."""
    tokenizer = service.engine.tokenizer
    supported = supported_request(body, tokenizer.chat_format, tokenizer.template_names)
    if supported.missing and not service.settings.lenient:
        raise supported.missing[0]
    if service.settings.strict_system_role and not tokenizer.has_system_role:
        _refuse_system_messages(body)
    prepared = prepare_messages(body.messages, uploads)
    render = _renderer(service, body, prepared, supported, uploads)
    return supported, prepared, render, render(prepared.messages)


def _refuse_system_messages(body: ChatRequest) -> None:
    for index, message in enumerate(body.messages):
        if ROLES.get(message.role, message.role) == "system":
            raise ApiError(
                UNSUPPORTED_VALUE,
                "The chat template of this model has no system messages, and this server does not add their text to "
                "the user message (--strict-system-role).",
                param=f"messages[{index}].role",
            )


def _renderer(
    service: Service,
    body: ChatRequest,
    prepared: PreparedMessages,
    supported: SupportedRequest,
    uploads: tuple[Upload, ...],
) -> Callable[[Messages], RenderedPrompt]:
    continued = bool(body.continue_final_message)
    return functools.partial(
        service.engine.tokenizer.render_chat,
        tools=supported.tool_set.tools,
        add_generation_prompt=not continued and body.add_generation_prompt is not False,
        continue_final_message=continued,
        arguments=supported.template_arguments,
        breakpoints=prepared.breakpoints,
        uploads=uploads,
    )


async def _request(
    service: Service, body: ChatRequest, prompt: RenderedPrompt, budget: SentField[int] | None, id: str
) -> Request:
    chat_format = service.engine.tokenizer.chat_format
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    plain = await engine_request(
        service, _with_cache_mode(body), prompt, id=id, max_tokens=_max_tokens(body), logprobs=logprobs
    )
    return replace(
        plain,
        reasoning_limit=_reasoning_limit(budget, chat_format, prompt.generation_prompt),
        include_special_tokens=chat_format.special or plain.include_special_tokens,
    )


def _reasoning_limit(
    budget: SentField[int] | None, chat_format: ChatFormat, generation_prompt: str
) -> ReasoningLimit | None:
    if budget is None or not chat_format.supports_reasoning:
        return None
    limit = chat_format.reasoning_limit(budget.value, generation_prompt)
    # None if the template has closed the reasoning; an error if the start of the reasoning cannot be recognised.
    if limit is None and chat_format.reasoning_limit(budget.value, "") is None:
        raise unsupported_parameter(budget.name, "its reasoning has no single start token")
    return limit


def _with_cache_mode(body: ChatRequest) -> ChatRequest:
    """The body, with caching disabled in OpenAI's explicit mode without breakpoints."""
    options = body.prompt_cache_options
    if options is None or options.mode != "explicit" or has_breakpoints(body.messages):
        return body
    return body.model_copy(update={"cache_prompt": False})
