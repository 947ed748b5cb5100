"""The stream of a chat: what its choices say, as chunks.

Clients join what repeats: the role, the id of a call and its name are sent once.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.chat_format.message import AnswerDelta, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from engine.types.events import Event, PrefillProgress, PromptScored, Started
from server.generation.chat_turn import ChatTurn, ChoiceDelta, ChoiceEnd, ChoiceEvent, ChoiceParser, Reason
from server.generation.logprobs import LogprobFormat, chat_logprobs, prompt_logprobs
from server.generation.requests import service_tier
from server.generation.stream_usage import StreamUsage
from server.http.encoding import PLACEHOLDER, JsonTemplate
from server.http.sse import frame
from server.openai.diagnostics import cache_diagnostics
from server.schemas.chat import CallDelta, ChatChunk, ChatDelta, ChatLogprobs, ChunkChoice, CustomDelta, FunctionDelta
from server.schemas.common import FinishReason


def finish_reason(turn: ChatTurn, reason: Reason) -> FinishReason:
    """Why a choice ended, in the words of the API that offered the tools."""
    return "function_call" if turn.tool_set.legacy and reason == "tool_calls" else reason


class ChatChunkEncoder:
    """The chunks of one stream, of one or several choices as they come."""

    def __init__(self, turn: ChatTurn, warnings: tuple[str, ...]) -> None:
        self._turn, self._body = turn, turn.body
        self._usage = StreamUsage(turn.body, turn.requests, len(turn.requests))
        self._logprob_format = LogprobFormat.of(turn.body, turn.body.top_logprobs or 0)
        self._warnings = warnings
        self._parsers = [ChoiceParser(turn) for _ in turn.requests]
        self._opened = False
        self._begun: set[int] = set()
        # Whether chunks of text tell nothing beside it, as nearly all do, and what they are written from.
        body = turn.body
        self._is_plain = not (body.logprobs or body.return_token_ids or self._usage.reports_continuously)
        self._templates: dict[tuple[int, type[TextDelta] | type[ReasoningDelta]], JsonTemplate] = {}
        # Of the first choice, which computes the prompt.
        self._first: ChoiceEnd | None = None
        # The calls of custom tools: number of the choice, number of the call.
        self._custom_calls: set[tuple[int, int]] = set()

    def encode(self, choice: int, event: Event) -> bytes:
        """The role once, what is said, and the end of each choice."""
        body = b""
        for heard in self._parsers[choice].parse(event):
            match heard:
                case ChoiceDelta(deltas=(TextDelta() | ReasoningDelta() as piece,)) if (
                    choice,
                    type(piece),
                ) in self._templates:
                    body += self._templates[choice, type(piece)].fill(piece.text)
                case _:
                    body += b"".join([self._encoded(chunk) for chunk in self._chunks(choice, heard)])
        return body

    async def close(self) -> bytes:
        """What became of the cache and what all cost, if it was asked for."""
        diagnosed = frame(await self._diagnosed()) if self._body.return_cache_diagnostics else b""
        return diagnosed + frame(self._usage_chunk()) if self._body.include_usage else diagnosed

    def _encoded(self, chunk: ChatChunk) -> bytes:
        if not self._opened:
            self._opened = True
            self._open(chunk)
        return frame(chunk)

    def _chunks(self, index: int, what: ChoiceEvent) -> Iterator[ChatChunk]:
        match what:
            case Started():
                self._usage.start(index, what)
            case PrefillProgress():
                yield self._progress(index, what)
            case PromptScored():
                yield self._scored(what)
            case ChoiceDelta():
                yield from self._role(index)
                self._usage.add_tokens(index, len(what.tokens))
                yield from self._content(index, what)
            case ChoiceEnd():
                yield from self._role(index)
                yield self._end(index, what)

    def _open(self, chunk: ChatChunk) -> None:
        """What the first chunk says beside its own."""
        if self._warnings:
            chunk["warnings"] = list(self._warnings)
        if self._body.return_token_ids:
            chunk["prompt_token_ids"] = list(self._turn.requests[0].prompt)

    def _role(self, index: int) -> Iterator[ChatChunk]:
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk(index, {"role": "assistant", "content": ""})
            for kind in (TextDelta, ReasoningDelta) if self._is_plain else ():
                chunk = self._chunk(index, self._delta(index, kind(PLACEHOLDER)))
                self._templates[index, kind] = JsonTemplate(frame(chunk))

    def _content(self, index: int, more: ChoiceDelta) -> Iterator[ChatChunk]:
        deltas = [self._delta(index, piece) for piece in more.deltas]
        logprobs = chat_logprobs(more.logprobs, self._logprob_format) if self._body.logprobs and more.logprobs else None
        tokens = list(more.tokens) if self._body.return_token_ids and more.tokens else None
        if not deltas and (logprobs or tokens):
            deltas = [{}]
        # What belongs to all of the pieces stands beside the first.
        for place, delta in enumerate(deltas):
            chunk = self._chunk(index, delta, None if place else logprobs)
            if tokens and not place:
                chunk["choices"][0]["token_ids"] = tokens
            yield chunk

    def _delta(self, index: int, piece: AnswerDelta) -> ChatDelta:
        match piece:
            case TextDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return {"reasoning_content": text, "reasoning": text}
            case ToolCallStart(name=name) if self._turn.tool_set.legacy:
                return {"function_call": {"name": name, "arguments": ""}}
            case ToolCallDelta(text=text) if self._turn.tool_set.legacy:
                return {"function_call": {"arguments": text}}
            case ToolCallStart(at, name, kind):
                if kind == "custom":
                    self._custom_calls.add((index, at))
                opened = self._call_delta(index, at, {"name": name, "arguments": ""})
                return {"tool_calls": [{**opened, "id": self._turn.call_id(index, at), "type": kind}]}
            case ToolCallDelta(at, text):
                return {"tool_calls": [self._call_delta(index, at, {"arguments": text})]}

    def _call_delta(self, index: int, at: int, more: FunctionDelta) -> CallDelta:
        """More of a call; what a custom tool takes has another name."""
        if (index, at) not in self._custom_calls:
            return {"index": at, "function": more}
        named: CustomDelta = {"input": more["arguments"]}
        return {"index": at, "custom": {"name": more["name"], **named} if "name" in more else named}

    def _end(self, index: int, ended: ChoiceEnd) -> ChatChunk:
        self._usage.end(index, ended.finished, ended.reasoning_tokens)
        if index == 0:
            self._first = ended
        chunk = self._chunk(index, {})
        chunk["choices"][0]["finish_reason"] = finish_reason(self._turn, ended.reason)
        chunk["choices"][0]["stop_reason"] = ended.finished.stop
        if self._body.return_token_ids:
            chunk["choices"][0]["token_ids"] = list(ended.finished.tokens)
        self._usage.add_final(chunk)
        return chunk

    async def _diagnosed(self) -> ChatChunk:
        assert self._first is not None, "the engine ends every stream with Finished or Failed"
        chunk = self._frame([])
        chunk["prompt_cache_diagnostics"] = await cache_diagnostics(self._turn, self._first.finished)
        return chunk

    def _usage_chunk(self) -> ChatChunk:
        chunk = self._frame([])
        self._usage.total(chunk)
        return chunk

    def _progress(self, index: int, event: PrefillProgress) -> ChatChunk:
        chunk = self._frame([])
        self._usage.add_progress(chunk, index, event)
        return chunk

    def _scored(self, event: PromptScored) -> ChatChunk:
        chunk = self._frame([])
        chunk["prompt_logprobs"] = prompt_logprobs(event.entries, self._body.prompt_logprobs or 0)
        return chunk

    def _chunk(self, index: int, delta: ChatDelta, logprobs: ChatLogprobs | None = None) -> ChatChunk:
        chunk = self._frame([ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=None)])
        self._usage.add_usage(chunk, index)
        return chunk

    def _frame(self, choices: list[ChunkChoice]) -> ChatChunk:
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
