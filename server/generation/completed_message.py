"""Whole answers of a turn: what its pieces add up to."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.chat_format.message import AnswerDelta, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart, ToolKind
from engine.types.events import PromptScored, TokenLogprob
from server.generation.chat_turn import ChatTurn, ChoiceDelta, ChoiceEnd, parse_choices
from server.http.errors import check_deadline
from server.http.events import ChoiceEvents


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; `arguments` is JSON text, of a custom tool the text that it takes."""

    id: str
    name: str
    arguments: str
    kind: ToolKind = "function"


@dataclass(frozen=True, slots=True)
class CompletedMessage:
    """One choice that ended well. `scored` is the prompt's, where it was asked for."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    ended: ChoiceEnd
    scored: PromptScored | None = None

    @property
    def scores(self) -> int:
        """Its tokens with log-probabilities, those of the prompt too."""
        return len(self.logprobs) + (0 if self.scored is None else len(self.scored.entries))


@dataclass(slots=True)
class MessageBuilder:
    """One choice as it is told, piece by piece."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    opened: list[ToolCallStart] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: ChoiceEnd | None = None
    scored: PromptScored | None = None

    def add(self, more: ChoiceDelta) -> None:
        """More of it."""
        self.tokens.extend(more.tokens)
        self.logprobs.extend(more.logprobs)
        for piece in more.deltas:
            self._add(piece)

    def _add(self, piece: AnswerDelta) -> None:
        match piece:
            case TextDelta(text):
                self.text.append(text)
            case ReasoningDelta(text):
                self.reasoning.append(text)
            case ToolCallStart():
                self.opened.append(piece)
                self.arguments.append([])
            case ToolCallDelta(index, text):
                self.arguments[index].append(text)

    def calls(self, turn: ChatTurn, index: int) -> tuple[ToolCall, ...]:
        """The calls so far, of choice number `index`."""
        pairs = zip(self.opened, self.arguments, strict=True)
        return tuple(
            ToolCall(turn.call_id(index, call.index), call.name, "".join(parts), call.kind) for call, parts in pairs
        )


async def collect_messages(turn: ChatTurn, events: ChoiceEvents) -> list[CompletedMessage]:
    """All choices of a turn, in order. ApiError where the time ran out before any of them said anything."""
    growing = [MessageBuilder() for _ in turn.requests]
    async for index, what in parse_choices(turn, events):
        match what:
            case ChoiceDelta():
                growing[index].add(what)
            case ChoiceEnd():
                growing[index].ended = what
            case PromptScored():
                growing[index].scored = what
    replies = [_reply(turn, index, choice) for index, choice in enumerate(growing)]
    check_deadline([reply.ended.finished for reply in replies])
    return replies


def _reply(turn: ChatTurn, index: int, choice: MessageBuilder) -> CompletedMessage:
    assert choice.ended is not None, "the engine ends every stream with Finished or Failed"
    return CompletedMessage(
        text="".join(choice.text),
        reasoning="".join(choice.reasoning),
        calls=choice.calls(turn, index),
        tokens=tuple(choice.tokens),
        logprobs=tuple(choice.logprobs),
        ended=choice.ended,
        scored=choice.scored,
    )
