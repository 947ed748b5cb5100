"""The stream of a chat: what its choices say, as chunks.

Clients join what repeats: the role, the id of a call and its name are sent once.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.chat_format.message import CallArguments, CallOpened, Piece, Reasoning, Text
from engine.types.events import Event, Progress, Scored, Started
from server.generation.accounts import Accounts
from server.generation.generation import tier
from server.generation.logprobs import Wording, chat_logprobs, prompt_logprobs
from server.generation.turn import Ended, Heard, Reason, Said, Turn, Voice
from server.http.encoding import HOLE, Template
from server.http.sse import frame
from server.openai.diagnostics import diagnose
from server.schemas.chat import CallDelta, ChatChunk, ChatDelta, ChatLogprobs, ChunkChoice, CustomDelta, FunctionDelta
from server.schemas.common import FinishReason


def finish_reason(turn: Turn, reason: Reason) -> FinishReason:
    """Why a choice ended, in the words of the API that offered the tools."""
    return "function_call" if turn.offer.legacy and reason == "tool_calls" else reason


class ChatChunks:
    """The chunks of one stream, of one or several choices as they come."""

    def __init__(self, turn: Turn, warnings: tuple[str, ...]) -> None:
        self._turn, self._body = turn, turn.body
        self._accounts = Accounts(turn.body, turn.requests, len(turn.requests))
        self._wording = Wording.of(turn.body, turn.body.top_logprobs or 0)
        self._warnings = warnings
        self._voices = [Voice(turn) for _ in turn.requests]
        self._opened = False
        self._begun: set[int] = set()
        # Whether chunks of text tell nothing beside it, as nearly all do, and what they are written from.
        body = turn.body
        self._bare = not (body.logprobs or body.return_token_ids or self._accounts.telling)
        self._templates: dict[tuple[int, type[Text] | type[Reasoning]], Template] = {}
        # Of the first choice, which computes the prompt.
        self._first: Ended | None = None
        # The calls of custom tools: number of the choice, number of the call.
        self._customs: set[tuple[int, int]] = set()

    def tell(self, choice: int, event: Event) -> bytes:
        """The role once, what is said, and the end of each choice."""
        body = b""
        for heard in self._voices[choice].hear(event):
            match heard:
                case Said(pieces=(Text() | Reasoning() as piece,)) if (choice, type(piece)) in self._templates:
                    body += self._templates[choice, type(piece)].fill(piece.text)
                case _:
                    body += b"".join([self._encoded(chunk) for chunk in self._chunks(choice, heard)])
        return body

    async def close(self) -> bytes:
        """What became of the cache and what all cost, if it was asked for."""
        diagnosed = frame(await self._diagnosed()) if self._body.return_cache_diagnostics else b""
        return diagnosed + frame(self._cost()) if self._body.include_usage else diagnosed

    def _encoded(self, chunk: ChatChunk) -> bytes:
        if not self._opened:
            self._opened = True
            self._open(chunk)
        return frame(chunk)

    def _chunks(self, index: int, what: Heard) -> Iterator[ChatChunk]:
        match what:
            case Started():
                self._accounts.start(index, what)
            case Progress():
                yield self._progress(index, what)
            case Scored():
                yield self._scored(what)
            case Said():
                yield from self._role(index)
                self._accounts.say(index, len(what.tokens))
                yield from self._said(index, what)
            case Ended():
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
            for kind in (Text, Reasoning) if self._bare else ():
                chunk = self._chunk(index, self._delta(index, kind(HOLE)))
                self._templates[index, kind] = Template(frame(chunk))

    def _said(self, index: int, more: Said) -> Iterator[ChatChunk]:
        deltas = [self._delta(index, piece) for piece in more.pieces]
        logprobs = chat_logprobs(more.logprobs, self._wording) if self._body.logprobs and more.logprobs else None
        tokens = list(more.tokens) if self._body.return_token_ids and more.tokens else None
        if not deltas and (logprobs or tokens):
            deltas = [{}]
        # What belongs to all of the pieces stands beside the first.
        for place, delta in enumerate(deltas):
            chunk = self._chunk(index, delta, None if place else logprobs)
            if tokens and not place:
                chunk["choices"][0]["token_ids"] = tokens
            yield chunk

    def _delta(self, index: int, piece: Piece) -> ChatDelta:
        match piece:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text, "reasoning": text}
            case CallOpened(name=name) if self._turn.offer.legacy:
                return {"function_call": {"name": name, "arguments": ""}}
            case CallArguments(text=text) if self._turn.offer.legacy:
                return {"function_call": {"arguments": text}}
            case CallOpened(at, name, kind):
                if kind == "custom":
                    self._customs.add((index, at))
                opened = self._called(index, at, {"name": name, "arguments": ""})
                return {"tool_calls": [{**opened, "id": self._turn.call_id(index, at), "type": kind}]}
            case CallArguments(at, text):
                return {"tool_calls": [self._called(index, at, {"arguments": text})]}

    def _called(self, index: int, at: int, more: FunctionDelta) -> CallDelta:
        """More of a call; what a custom tool takes has another name."""
        if (index, at) not in self._customs:
            return {"index": at, "function": more}
        named: CustomDelta = {"input": more["arguments"]}
        return {"index": at, "custom": {"name": more["name"], **named} if "name" in more else named}

    def _end(self, index: int, ended: Ended) -> ChatChunk:
        self._accounts.end(index, ended.finished, ended.reasoning_tokens)
        if index == 0:
            self._first = ended
        chunk = self._chunk(index, {})
        chunk["choices"][0]["finish_reason"] = finish_reason(self._turn, ended.reason)
        chunk["choices"][0]["stop_reason"] = ended.finished.stop
        if self._body.return_token_ids:
            chunk["choices"][0]["token_ids"] = list(ended.finished.tokens)
        self._accounts.close(chunk)
        return chunk

    async def _diagnosed(self) -> ChatChunk:
        assert self._first is not None, "the engine ends every stream with Finished or Failed"
        chunk = self._frame([])
        chunk["prompt_cache_diagnostics"] = await diagnose(self._turn, self._first.finished)
        return chunk

    def _cost(self) -> ChatChunk:
        chunk = self._frame([])
        self._accounts.total(chunk)
        return chunk

    def _progress(self, index: int, event: Progress) -> ChatChunk:
        chunk = self._frame([])
        self._accounts.progress(chunk, index, event)
        return chunk

    def _scored(self, event: Scored) -> ChatChunk:
        chunk = self._frame([])
        chunk["prompt_logprobs"] = prompt_logprobs(event.entries, self._body.prompt_logprobs or 0)
        return chunk

    def _chunk(self, index: int, delta: ChatDelta, logprobs: ChatLogprobs | None = None) -> ChatChunk:
        chunk = self._frame([ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=None)])
        self._accounts.tell(chunk, index)
        return chunk

    def _frame(self, choices: list[ChunkChoice]) -> ChatChunk:
        chunk = ChatChunk(
            id=self._turn.id,
            object="chat.completion.chunk",
            created=self._turn.created,
            model=self._turn.model,
            service_tier=tier(self._body),
            system_fingerprint=self._turn.fingerprint,
            choices=choices,
        )
        self._accounts.announce(chunk)
        return chunk
