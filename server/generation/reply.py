"""Whole answers of a turn: what its pieces add up to."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.chat_format.message import CallArguments, CallOpened, Piece, Reasoning, Text, ToolKind
from engine.types.events import Scored, TokenLogprob
from server.generation.turn import Ended, Said, Turn, said
from server.http.errors import check_deadline
from server.http.events import Events


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool; `arguments` is JSON text, of a custom tool the text that it takes."""

    id: str
    name: str
    arguments: str
    kind: ToolKind = "function"


@dataclass(frozen=True, slots=True)
class Reply:
    """One choice that ended well. `scored` is the prompt's, where it was asked for."""

    text: str
    reasoning: str
    calls: tuple[Call, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    ended: Ended
    scored: Scored | None = None

    @property
    def scores(self) -> int:
        """Its tokens with log-probabilities, those of the prompt too."""
        return len(self.logprobs) + (0 if self.scored is None else len(self.scored.entries))


@dataclass(slots=True)
class Growing:
    """One choice as it is told, piece by piece."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    opened: list[CallOpened] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: Ended | None = None
    scored: Scored | None = None

    def take(self, more: Said) -> None:
        """More of it."""
        self.tokens.extend(more.tokens)
        self.logprobs.extend(more.logprobs)
        for piece in more.pieces:
            self._add(piece)

    def _add(self, piece: Piece) -> None:
        match piece:
            case Text(text):
                self.text.append(text)
            case Reasoning(text):
                self.reasoning.append(text)
            case CallOpened():
                self.opened.append(piece)
                self.arguments.append([])
            case CallArguments(index, text):
                self.arguments[index].append(text)

    def calls(self, turn: Turn, index: int) -> tuple[Call, ...]:
        """The calls so far, of choice number `index`."""
        pairs = zip(self.opened, self.arguments, strict=True)
        return tuple(
            Call(turn.call_id(index, call.index), call.name, "".join(parts), call.kind) for call, parts in pairs
        )


async def gather(turn: Turn, events: Events) -> list[Reply]:
    """All choices of a turn, in order. ApiError where the time ran out before any of them said anything."""
    growing = [Growing() for _ in turn.requests]
    async for index, what in said(turn, events):
        match what:
            case Said():
                growing[index].take(what)
            case Ended():
                growing[index].ended = what
            case Scored():
                growing[index].scored = what
    replies = [_reply(turn, index, choice) for index, choice in enumerate(growing)]
    check_deadline([reply.ended.finished for reply in replies])
    return replies


def _reply(turn: Turn, index: int, choice: Growing) -> Reply:
    assert choice.ended is not None, "the engine ends every stream with Finished or Failed"
    return Reply(
        text="".join(choice.text),
        reasoning="".join(choice.reasoning),
        calls=choice.calls(turn, index),
        tokens=tuple(choice.tokens),
        logprobs=tuple(choice.logprobs),
        ended=choice.ended,
        scored=choice.scored,
    )
