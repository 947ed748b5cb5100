"""One turn of a conversation: what every chat API boils down to.

An API translates its body into a `ChatRequest`, makes a `Turn` of it, runs the turn's requests
(`generation.generate`), and reads what is `said`: text, reasoning and calls, in pieces as they come.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import anyio.to_thread

from engine.chat_format.answer_parser import AnswerParser
from engine.chat_format.chat_format import ChatFormat
from engine.chat_format.message import AnswerDelta, ReasoningDelta, TextDelta, ToolCallStart
from engine.text.wording import undeclared_variables
from engine.types.events import Delta, Event, Finished, PrefillProgress, PromptScored, Started, TokenLogprob
from engine.types.request import ReasoningLimit, RenderedPrompt, Request
from server.generation.grammar import answer_grammar
from server.generation.message_locator import MessageLocator, Messages
from server.generation.messages import PreparedMessages, has_breakpoints, prepare_messages
from server.generation.requests import check_capacity, choice_requests, engine_request, truncated_prompt
from server.generation.support import REASONING_BUDGETS, SupportedRequest, supported_request
from server.generation.tools import ToolSet
from server.http.errors import invalid_value, unsupported_parameter
from server.http.events import ChoiceEvents
from server.schemas.chat import ChatRequest
from server.service import Service

Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """More of one choice. `tokens` and `logprobs` belong to the text that the pieces were read from."""

    deltas: tuple[AnswerDelta, ...]
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """The end of one choice. A choice that called a tool ended for that, unless it was cut."""

    reason: Reason
    finished: Finished
    reasoning_tokens: int


ChoiceEvent = ChoiceDelta | ChoiceEnd | Started | PrefillProgress | PromptScored


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A body that is checked and rendered.

    requests  one for each choice, of one prompt
    message_locator    where its messages stand in the prompt
    cache_bypassed  whether it wants nothing from the cache
    prompt_end    what the template wrote behind the last message
    warnings  what was asked for and is not done, where the server or the schema of the answer is lenient
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
    prompt_end: str = ""
    warnings: tuple[str, ...] = ()

    def answer_parser(self) -> AnswerParser:
        """For the text of one choice."""
        return self.chat_format.parser(self.tool_set.tools, self.prompt_end)

    def call_id(self, choice: int, index: int) -> str:
        """The id of call number `index`: the same however often it is asked for."""
        # Of the engine's id, not of the answer's own: a client may have chosen that, and more than once.
        asked = self.requests[0].id
        return f"call_{hashlib.sha256(f'{asked}/{choice}/{index}'.encode()).hexdigest()[:24]}"


async def prepare_chat(service: Service, body: ChatRequest, id: str) -> ChatTurn:
    """Check and render a body; raises ApiError or EngineError for what is wrong with it, before anything runs."""
    model = service.resolve(body.model)
    service.check_ready()
    _check(body)
    can, talk, render, rendered = await anyio.to_thread.run_sync(_rendered, service, body)
    dialect = service.engine.tokenizer.chat_format
    prompt = truncated_prompt(service, body, rendered, _max_tokens(body))
    followed = await answer_grammar(service, body, dialect, can.tool_set, prompt.generation_prompt)
    full = await _request(service, body, prompt, can.reasoning_budget, id)
    requests = choice_requests(replace(full, grammar=followed.grammar), body.n or 1)
    check_capacity(service, requests)
    return ChatTurn(
        id=id if body.request_id is None else f"chatcmpl-{body.request_id}",
        created=int(time.time()),
        model=model,
        fingerprint=service.fingerprint(),
        body=body,
        requests=requests,
        chat_format=dialect,
        message_locator=MessageLocator(talk.messages, prompt.tokens, lambda messages: render(messages).tokens),
        cache_bypassed=_uses_cache(body).cache_prompt is False,
        tool_set=can.tool_set,
        prompt_end=prompt.generation_prompt,
        warnings=(*can.warnings, *(error.message for error in can.missing), *followed.warnings),
    )


async def parse_choices(turn: ChatTurn, events: ChoiceEvents) -> AsyncGenerator[tuple[int, ChoiceEvent], None]:
    """What the choices say, as it comes."""
    voices = [ChoiceParser(turn) for _ in turn.requests]
    async for choice, event in events:
        for heard in voices[choice].parse(event):
            yield choice, heard


class ChoiceParser:
    """One choice as it is read: of its events what they say, and exactly one Ended at its end."""

    def __init__(self, turn: ChatTurn) -> None:
        self._parser = turn.answer_parser()
        self._supports_reasoning = turn.body.include_reasoning is not False
        # What a regular expression matched is part of the text already.
        self._shown_stops = frozenset(turn.body.stop or ()) if turn.body.include_stop_str_in_output else frozenset()
        self._called = False
        self._reasoning_tokens = 0.0
        # Tokens that no piece has come of yet, such as those of a marker: they count with what comes next.
        self._pending = 0

    def parse(self, event: Event) -> Sequence[ChoiceEvent]:
        """What an event says."""
        match event:
            case Delta(text, tokens, logprobs):
                self._pending += len(tokens)
                return (ChoiceDelta(self._shown(self._parser.push(text)), tokens, logprobs),)
            case Finished():
                rest, ended = self._flush(event), self._ended(event)
                return (ChoiceDelta(rest), ended) if rest else (ended,)
            case Started() | PrefillProgress() | PromptScored():
                return (event,)
        return ()

    def _flush(self, finished: Finished) -> tuple[AnswerDelta, ...]:
        """What was held back until the end was certain."""
        ending = finished.stop if finished.stop in self._shown_stops and finished.reason == "stop" else None
        close = self._parser.cut if finished.reason == "length" else self._parser.finish
        return self._shown([*(self._parser.push(ending) if isinstance(ending, str) else ()), *close()])

    def _ended(self, finished: Finished) -> ChoiceEnd:
        reason: Reason = "tool_calls" if self._called and finished.reason == "stop" else finished.reason
        return ChoiceEnd(reason, finished, round(self._reasoning_tokens))

    def _shown(self, pieces: Sequence[AnswerDelta]) -> tuple[AnswerDelta, ...]:
        """The pieces that are shown; all of them count."""
        match pieces:
            case []:
                return ()
            case [TextDelta() as text]:
                # As nearly always: it need not be counted to be known.
                self._pending = 0
                return (text,)
        self._count(pieces)
        return tuple(piece for piece in pieces if self._supports_reasoning or not isinstance(piece, ReasoningDelta))

    def _count(self, pieces: Sequence[AnswerDelta]) -> None:
        """Tokens of a delta that holds reasoning and something else are shared out by letters."""
        self._called = self._called or any(isinstance(piece, ToolCallStart) for piece in pieces)
        letters = [0 if isinstance(piece, ToolCallStart) else len(piece.text) for piece in pieces]
        thought = sum(size for piece, size in zip(pieces, letters, strict=True) if isinstance(piece, ReasoningDelta))
        self._reasoning_tokens += self._pending * thought / max(sum(letters), 1)
        self._pending = 0


def _check(body: ChatRequest) -> None:
    for field_, needed in (("top_logprobs", body.top_logprobs), ("logprob_token_ids", body.logprob_token_ids)):
        if needed and not body.logprobs:
            raise invalid_value(field_, "it needs 'logprobs' to be true")
    budgets = (body.thinking_token_budget, body.thinking_budget_tokens)
    if None not in budgets and budgets[0] != budgets[1]:
        raise invalid_value(
            "thinking_budget_tokens", "it is another name of 'thinking_token_budget' and differs from it"
        )
    if body.return_cache_diagnostics and body.truncate_prompt_tokens is not None:
        raise invalid_value(
            "return_cache_diagnostics", "a prompt that 'truncate_prompt_tokens' cuts has no known messages"
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid_value("add_generation_prompt", "it cannot be true together with 'continue_final_message'")
    if body.continue_final_message and body.messages[-1].role != "assistant":
        raise invalid_value("continue_final_message", "the last message is not one of the assistant")


def _max_tokens(body: ChatRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid_value("max_tokens", "it differs from 'max_completion_tokens'; give one of them")
    return old if new is None else new


def _rendered(
    service: Service, body: ChatRequest
) -> tuple[SupportedRequest, PreparedMessages, Callable[[Messages], RenderedPrompt], RenderedPrompt]:
    """What the model can do of a body, its conversation, how that is rendered, and its prompt; for a worker thread."""
    tokenizer = service.engine.tokenizer
    can = supported_request(body, tokenizer.chat_format, undeclared_variables(tokenizer.template))
    if can.missing and not service.settings.lenient:
        raise can.missing[0]
    talk = prepare_messages(body.messages)
    render = _renderer(service, body, talk, can)
    return can, talk, render, render(talk.messages)


def _renderer(
    service: Service, body: ChatRequest, talk: PreparedMessages, can: SupportedRequest
) -> Callable[[Messages], RenderedPrompt]:
    continued = bool(body.continue_final_message)
    return functools.partial(
        service.engine.tokenizer.render_chat,
        tools=can.tool_set.tools,
        add_generation_prompt=not continued and body.add_generation_prompt is not False,
        continue_final_message=continued,
        arguments=can.template_arguments,
        breakpoints=talk.breakpoints,
    )


async def _request(service: Service, body: ChatRequest, prompt: RenderedPrompt, budget: int | None, id: str) -> Request:
    dialect = service.engine.tokenizer.chat_format
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    plain = await engine_request(
        service, _uses_cache(body), prompt, id=id, max_tokens=_max_tokens(body), logprobs=logprobs
    )
    return replace(
        plain,
        reasoning_limit=_reasoning_limit(budget, dialect, prompt.generation_prompt),
        include_special_tokens=dialect.special or plain.include_special_tokens,
    )


def _reasoning_limit(budget: int | None, dialect: ChatFormat, opened: str) -> ReasoningLimit | None:
    thinking = None if budget is None else dialect.reasoning_limit(budget, opened)
    # Where the template has closed the reasoning there is none to limit; else nobody could tell where it begins.
    if budget is not None and thinking is None and dialect.reasoning_limit(budget, "") is None:
        raise unsupported_parameter(REASONING_BUDGETS[0], "its reasoning does not begin with one token")
    return thinking


def _uses_cache(body: ChatRequest) -> ChatRequest:
    """In OpenAI's words, a prompt with explicit breakpoints only and none of them does not use the cache."""
    options = body.prompt_cache_options
    if options is None or options.mode != "explicit" or has_breakpoints(body.messages):
        return body
    return body.model_copy(update={"cache_prompt": False})
