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

from engine.chat_format.chat_format import Dialect
from engine.chat_format.message import CallOpened, Piece, Reasoning, Text
from engine.chat_format.reader import Reader
from engine.text.wording import names
from engine.types.events import Delta, Event, Finished, Progress, Scored, Started, TokenLogprob
from engine.types.request import Rendering, Request, Thinking
from server.generation.ability import BUDGETS, Ability, ability
from server.generation.generation import check_room, request, shortened, spread
from server.generation.grammar import follow
from server.generation.messages import Conversation, conversation, has_breakpoints
from server.generation.places import Messages, Places
from server.generation.tools import Offer
from server.http.errors import invalid, unsupported
from server.http.events import Events
from server.schemas.chat import ChatRequest
from server.service import Service

Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Said:
    """More of one choice. `tokens` and `logprobs` belong to the text that the pieces were read from."""

    pieces: tuple[Piece, ...]
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of one choice. A choice that called a tool ended for that, unless it was cut."""

    reason: Reason
    finished: Finished
    reasoning_tokens: int


Heard = Said | Ended | Started | Progress | Scored


@dataclass(frozen=True, slots=True)
class Turn:
    """A body that is checked and rendered.

    requests  one for each choice, of one prompt
    places    where its messages stand in the prompt
    bypassed  whether it wants nothing from the cache
    opened    what the template wrote behind the last message
    warnings  what was asked for and is not done, where the server or the schema of the answer is lenient
    """

    id: str
    created: int
    model: str
    fingerprint: str
    body: ChatRequest
    requests: tuple[Request, ...]
    dialect: Dialect
    places: Places
    bypassed: bool = False
    offer: Offer = field(default_factory=Offer)
    opened: str = ""
    warnings: tuple[str, ...] = ()

    def reader(self) -> Reader:
        """For the text of one choice."""
        return self.dialect.reader(self.offer.tools, self.opened)

    def call_id(self, choice: int, index: int) -> str:
        """The id of call number `index`: the same however often it is asked for."""
        # Of the engine's id, not of the answer's own: a client may have chosen that, and more than once.
        asked = self.requests[0].id
        return f"call_{hashlib.sha256(f'{asked}/{choice}/{index}'.encode()).hexdigest()[:24]}"


async def chat_turn(service: Service, body: ChatRequest, id: str) -> Turn:
    """Check and render a body; raises ApiError or EngineError for what is wrong with it, before anything runs."""
    model = service.resolve(body.model)
    service.check_ready()
    _check(body)
    can, talk, render, rendered = await anyio.to_thread.run_sync(_rendered, service, body)
    dialect = service.engine.tokenizer.dialect
    prompt = shortened(service, body, rendered, _max_tokens(body))
    followed = await follow(service, body, dialect, can.offer, prompt.opened)
    full = await _request(service, body, prompt, can.budget, id)
    requests = spread(replace(full, grammar=followed.grammar), body.n or 1)
    check_room(service, requests)
    return Turn(
        id=id if body.request_id is None else f"chatcmpl-{body.request_id}",
        created=int(time.time()),
        model=model,
        fingerprint=service.fingerprint(),
        body=body,
        requests=requests,
        dialect=dialect,
        places=Places(talk.messages, prompt.tokens, lambda messages: render(messages).tokens),
        bypassed=_cached(body).cache_prompt is False,
        offer=can.offer,
        opened=prompt.opened,
        warnings=(*can.warnings, *(error.message for error in can.missing), *followed.warnings),
    )


async def said(turn: Turn, events: Events) -> AsyncGenerator[tuple[int, Heard], None]:
    """What the choices say, as it comes."""
    voices = [Voice(turn) for _ in turn.requests]
    async for choice, event in events:
        for heard in voices[choice].hear(event):
            yield choice, heard


class Voice:
    """One choice as it is read: of its events what they say, and exactly one Ended at its end."""

    def __init__(self, turn: Turn) -> None:
        self._reader = turn.reader()
        self._reasons = turn.body.include_reasoning is not False
        # What a regular expression matched is part of the text already.
        self._shown_stops = frozenset(turn.body.stop or ()) if turn.body.include_stop_str_in_output else frozenset()
        self._called = False
        self._reasoning_tokens = 0.0
        # Tokens that no piece has come of yet, such as those of a marker: they count with what comes next.
        self._pending = 0

    def hear(self, event: Event) -> Sequence[Heard]:
        """What an event says."""
        match event:
            case Delta(text, tokens, logprobs):
                self._pending += len(tokens)
                return (Said(self._taken(self._reader.push(text)), tokens, logprobs),)
            case Finished():
                rest, ended = self._rest(event), self._ended(event)
                return (Said(rest), ended) if rest else (ended,)
            case Started() | Progress() | Scored():
                return (event,)
        return ()

    def _rest(self, finished: Finished) -> tuple[Piece, ...]:
        """What was held back until the end was certain."""
        ending = finished.stop if finished.stop in self._shown_stops and finished.reason == "stop" else None
        close = self._reader.cut if finished.reason == "length" else self._reader.finish
        return self._taken([*(self._reader.push(ending) if isinstance(ending, str) else ()), *close()])

    def _ended(self, finished: Finished) -> Ended:
        reason: Reason = "tool_calls" if self._called and finished.reason == "stop" else finished.reason
        return Ended(reason, finished, round(self._reasoning_tokens))

    def _taken(self, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        """The pieces that are shown; all of them count."""
        match pieces:
            case []:
                return ()
            case [Text() as text]:
                # As nearly always: it need not be counted to be known.
                self._pending = 0
                return (text,)
        self._count(pieces)
        return tuple(piece for piece in pieces if self._reasons or not isinstance(piece, Reasoning))

    def _count(self, pieces: Sequence[Piece]) -> None:
        """Tokens of a delta that holds reasoning and something else are shared out by letters."""
        self._called = self._called or any(isinstance(piece, CallOpened) for piece in pieces)
        letters = [0 if isinstance(piece, CallOpened) else len(piece.text) for piece in pieces]
        thought = sum(size for piece, size in zip(pieces, letters, strict=True) if isinstance(piece, Reasoning))
        self._reasoning_tokens += self._pending * thought / max(sum(letters), 1)
        self._pending = 0


def _check(body: ChatRequest) -> None:
    for field_, needed in (("top_logprobs", body.top_logprobs), ("logprob_token_ids", body.logprob_token_ids)):
        if needed and not body.logprobs:
            raise invalid(field_, "it needs 'logprobs' to be true")
    budgets = (body.thinking_token_budget, body.thinking_budget_tokens)
    if None not in budgets and budgets[0] != budgets[1]:
        raise invalid("thinking_budget_tokens", "it is another name of 'thinking_token_budget' and differs from it")
    if body.return_cache_diagnostics and body.truncate_prompt_tokens is not None:
        raise invalid("return_cache_diagnostics", "a prompt that 'truncate_prompt_tokens' cuts has no known messages")
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid("add_generation_prompt", "it cannot be true together with 'continue_final_message'")
    if body.continue_final_message and body.messages[-1].role != "assistant":
        raise invalid("continue_final_message", "the last message is not one of the assistant")


def _max_tokens(body: ChatRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", "it differs from 'max_completion_tokens'; give one of them")
    return old if new is None else new


def _rendered(
    service: Service, body: ChatRequest
) -> tuple[Ability, Conversation, Callable[[Messages], Rendering], Rendering]:
    """What the model can do of a body, its conversation, how that is rendered, and its prompt; for a worker thread."""
    tokenizer = service.engine.tokenizer
    can = ability(body, tokenizer.dialect, names(tokenizer.template))
    if can.missing and not service.settings.lenient:
        raise can.missing[0]
    talk = conversation(body.messages)
    render = _renderer(service, body, talk, can)
    return can, talk, render, render(talk.messages)


def _renderer(service: Service, body: ChatRequest, talk: Conversation, can: Ability) -> Callable[[Messages], Rendering]:
    continued = bool(body.continue_final_message)
    return functools.partial(
        service.engine.tokenizer.render_chat,
        tools=can.offer.tools,
        add_generation_prompt=not continued and body.add_generation_prompt is not False,
        continue_final_message=continued,
        arguments=can.arguments,
        breakpoints=talk.breakpoints,
    )


async def _request(service: Service, body: ChatRequest, prompt: Rendering, budget: int | None, id: str) -> Request:
    dialect = service.engine.tokenizer.dialect
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    plain = await request(service, _cached(body), prompt, id=id, max_tokens=_max_tokens(body), logprobs=logprobs)
    return replace(
        plain,
        thinking=_thinking(budget, dialect, prompt.opened),
        special=dialect.special or plain.special,
    )


def _thinking(budget: int | None, dialect: Dialect, opened: str) -> Thinking | None:
    thinking = None if budget is None else dialect.thinking(budget, opened)
    # Where the template has closed the reasoning there is none to limit; else nobody could tell where it begins.
    if budget is not None and thinking is None and dialect.thinking(budget, "") is None:
        raise unsupported(BUDGETS[0], "its reasoning does not begin with one token")
    return thinking


def _cached(body: ChatRequest) -> ChatRequest:
    """In OpenAI's words, a prompt with explicit breakpoints only and none of them does not use the cache."""
    options = body.prompt_cache_options
    if options is None or options.mode != "explicit" or has_breakpoints(body.messages):
        return body
    return body.model_copy(update={"cache_prompt": False})
