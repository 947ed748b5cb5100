"""Chunks of a streamed chat completion.

Clients concatenate repeated fields, so the role, and the id and name of a tool call are sent once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from engine.chat_format.message import AnswerDelta, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from engine.types.events import Event, PrefillProgress, PromptScored, Started
from server.generation.chat_turn import (
    ChatTurn,
    ChoiceDelta,
    ChoiceEnd,
    ChoiceEvent,
    ChoiceParser,
    EarlierDelta,
    Reason,
)
from server.generation.continuation import is_resumable
from server.generation.logprobs import LogprobFormat, chat_logprobs, prompt_logprobs
from server.generation.requests import service_tier
from server.generation.stream_usage import StreamUsage
from server.http.encoding import PLACEHOLDER, JsonTemplate
from server.http.sse import frame
from server.openai.diagnostics import cache_diagnostics
from server.schemas.chat import CallDelta, ChatChunk, ChatDelta, ChatLogprobs, ChunkChoice, CustomDelta, FunctionDelta
from server.schemas.common import FinishReason


def finish_reason(turn: ChatTurn, reason: Reason) -> FinishReason:
    """The finish reason; "function_call" for requests with the older `functions`."""
    return "function_call" if turn.tool_set.legacy and reason == "tool_calls" else reason


def _joined(deltas: Sequence[ChatDelta]) -> ChatDelta:
    """Deltas as one: texts of a field are concatenated, and each tool call is listed once."""
    joined: dict[str, Any] = {}
    for delta in deltas:
        _join(joined, delta)
    return cast(ChatDelta, joined)


def _join(joined: dict[str, Any], added: Mapping[str, Any]) -> None:
    for name, value in added.items():
        if name not in joined or name == "index":
            joined[name] = value
        elif isinstance(value, str):
            joined[name] += value
        elif isinstance(value, dict):
            joined[name] = {**joined[name]}
            _join(joined[name], value)
        else:
            calls = {call["index"]: dict(call) for call in joined[name]}
            for call in value:
                _join(calls.setdefault(call["index"], {}), call)
            joined[name] = list(calls.values())


class ChatChunkEncoder:
    """Encodes the events of one stream, with one or more choices, as chunks."""

    def __init__(self, turn: ChatTurn, warnings: tuple[str, ...]) -> None:
        self._turn, self._body = turn, turn.body
        self._usage = StreamUsage(turn.body, turn.requests, len(turn.requests))
        self._logprob_format = LogprobFormat.of(turn.body, turn.body.top_logprobs or 0)
        self._warnings = warnings
        self._parsers = [ChoiceParser(turn) for _ in turn.requests]
        self._has_first = False
        self._started: set[int] = set()
        # Fast path: chunks with text only are encoded from a template per choice and kind.
        body = turn.body
        self._is_plain = not (body.logprobs or body.return_token_ids or self._usage.reports_continuously)
        self._templates: dict[tuple[int, type[TextDelta] | type[ReasoningDelta]], JsonTemplate] = {}
        # Only the first choice computes the prompt.
        self._first: ChoiceEnd | None = None
        # Custom tool calls: (choice, call).
        self._custom_calls: set[tuple[int, int]] = set()
        # Parts without tokens at the end of a choice: they are in the last chunk, so that a client has all or none.
        self._is_resumable = is_resumable(body)
        self._held: dict[int, tuple[AnswerDelta, ...]] = {}
        self._seed = 0

    def encode(self, choice: int, event: Event) -> bytes:
        """Encode the chunks of an event."""
        return b"".join([self._encode(choice, parsed) for parsed in self._parsers[choice].parse(event)])

    async def close(self) -> bytes:
        """Cache diagnostics and usage, if requested."""
        diagnosed = frame(await self._diagnosed()) if self._body.return_cache_diagnostics else b""
        return diagnosed + frame(self._usage_chunk()) if self._body.include_usage else diagnosed

    def _encode(self, index: int, event: ChoiceEvent) -> bytes:
        match event:
            case ChoiceDelta(deltas=(TextDelta() | ReasoningDelta() as part,)):
                template = self._templates.get((index, type(part)))
                if template is not None:
                    return template.fill(part.text)
        return b"".join([self._encoded(chunk) for chunk in self._chunks(index, event)])

    def _encoded(self, chunk: ChatChunk) -> bytes:
        if not self._has_first:
            self._has_first = True
            self._open(chunk)
        return frame(chunk)

    def _chunks(self, index: int, event: ChoiceEvent) -> Iterator[ChatChunk]:
        match event:
            case Started():
                self._usage.start(index, event)
                self._seed = event.seed
            case EarlierDelta(delta):
                self._skip(index, delta)
            case PrefillProgress():
                yield self._progress(index, event)
            case PromptScored():
                yield self._scored(event)
            case ChoiceDelta():
                yield from self._role(index)
                self._usage.add_tokens(index, len(event.tokens))
                if self._is_resumable and not event.tokens:
                    self._held[index] = (*self._held.get(index, ()), *event.deltas)
                else:
                    yield from self._content(index, event)
            case ChoiceEnd():
                yield from self._role(index)
                yield self._end(index, event)

    def _open(self, chunk: ChatChunk) -> None:
        """Add the fields of the first chunk."""
        if self._warnings:
            chunk["warnings"] = list(self._warnings)
        if self._body.return_token_ids:
            chunk["prompt_token_ids"] = list(self._turn.requests[0].prompt)
        if self._is_resumable and len(self._turn.requests) == 1:
            chunk["seed"] = self._seed

    def _skip(self, index: int, earlier: ChoiceDelta) -> None:
        """Follow a delta that the client has already."""
        self._started.add(index)
        self._usage.add_tokens(index, len(earlier.tokens))
        for part in earlier.deltas:
            self._delta(index, part)

    def _role(self, index: int) -> Iterator[ChatChunk]:
        if index not in self._started:
            self._started.add(index)
            yield self._chunk(index, {"role": "assistant", "content": ""})
            for kind in (TextDelta, ReasoningDelta) if self._is_plain else ():
                chunk = self._chunk(index, self._delta(index, kind(PLACEHOLDER)))
                self._templates[index, kind] = JsonTemplate(frame(chunk))

    def _content(self, index: int, choice_delta: ChoiceDelta) -> Iterator[ChatChunk]:
        deltas = [self._delta(index, part) for part in choice_delta.deltas]
        if self._is_resumable:
            deltas = [_joined(deltas)]
        logprobs = (
            chat_logprobs(choice_delta.logprobs, self._logprob_format)
            if self._body.logprobs and choice_delta.logprobs
            else None
        )
        tokens = list(choice_delta.tokens) if self._body.return_token_ids and choice_delta.tokens else None
        if not deltas and (logprobs or tokens):
            deltas = [{}]
        # Log-probabilities and token ids belong to all deltas of an event; they are sent with the first.
        for place, delta in enumerate(deltas):
            chunk = self._chunk(index, delta, None if place else logprobs)
            if tokens and not place:
                chunk["choices"][0]["token_ids"] = tokens
            yield chunk

    def _delta(self, index: int, part: AnswerDelta) -> ChatDelta:
        match part:
            case TextDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return {"reasoning_content": text, "reasoning": text}
            case ToolCallStart(name=name) if self._turn.tool_set.legacy:
                return {"function_call": {"name": name, "arguments": ""}}
            case ToolCallDelta(text=text) if self._turn.tool_set.legacy:
                return {"function_call": {"arguments": text}}
            case ToolCallStart(call_index, name, kind):
                if kind == "custom":
                    self._custom_calls.add((index, call_index))
                start = self._call_delta(index, call_index, {"name": name, "arguments": ""})
                return {"tool_calls": [{**start, "id": self._turn.call_id(index, call_index), "type": kind}]}
            case ToolCallDelta(call_index, text):
                return {"tool_calls": [self._call_delta(index, call_index, {"arguments": text})]}

    def _call_delta(self, index: int, call_index: int, delta: FunctionDelta) -> CallDelta:
        """A delta of a tool call; custom tools have other field names."""
        if (index, call_index) not in self._custom_calls:
            return {"index": call_index, "function": delta}
        custom: CustomDelta = {"input": delta["arguments"]}
        return {"index": call_index, "custom": {"name": delta["name"], **custom} if "name" in delta else custom}

    def _end(self, index: int, end: ChoiceEnd) -> ChatChunk:
        self._usage.end(index, end.finished, end.reasoning_tokens)
        if index == 0:
            self._first = end
        held = [self._delta(index, part) for part in self._held.pop(index, ())]
        chunk = self._chunk(index, _joined(held))
        chunk["choices"][0]["finish_reason"] = finish_reason(self._turn, end.reason)
        chunk["choices"][0]["stop_reason"] = end.finished.stop
        if self._body.return_token_ids:
            chunk["choices"][0]["token_ids"] = list(end.finished.tokens)
        self._usage.add_final_timings(chunk)
        return chunk

    async def _diagnosed(self) -> ChatChunk:
        assert self._first is not None, "the engine ends every stream with Finished or Failed"
        chunk = self._new_chunk([])
        chunk["prompt_cache_diagnostics"] = await cache_diagnostics(self._turn, self._first.finished)
        return chunk

    def _usage_chunk(self) -> ChatChunk:
        chunk = self._new_chunk([])
        self._usage.add_total(chunk)
        return chunk

    def _progress(self, index: int, event: PrefillProgress) -> ChatChunk:
        chunk = self._new_chunk([])
        self._usage.add_progress(chunk, index, event)
        return chunk

    def _scored(self, event: PromptScored) -> ChatChunk:
        chunk = self._new_chunk([])
        chunk["prompt_logprobs"] = prompt_logprobs(event.entries, self._body.prompt_logprobs or 0)
        return chunk

    def _chunk(self, index: int, delta: ChatDelta, logprobs: ChatLogprobs | None = None) -> ChatChunk:
        chunk = self._new_chunk([ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=None)])
        self._usage.add_usage(chunk, index)
        return chunk

    def _new_chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        chunk = ChatChunk(
            id=self._turn.id,
            object="chat.completion.chunk",
            created=self._turn.created,
            model=self._turn.model,
            service_tier=service_tier(self._body),
            system_fingerprint=self._turn.fingerprint,
            choices=choices,
        )
        self._usage.add_placeholder(chunk)
        return chunk
