"""Collects the deltas of chat choices into complete messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.chat_format.message import AnswerDelta, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart, ToolKind
from engine.types.events import PromptScored, TokenLogprob
from server.generation.chat_turn import ChatTurn, ChoiceDelta, ChoiceEnd, EarlierDelta, parse_choices
from server.http.errors import check_deadline
from server.http.events import ChoiceEvents, in_batches


@dataclass(frozen=True, slots=True)
class CompletedToolCall:
    """A complete tool call; `arguments`: JSON text, or the text input of a custom tool."""

    id: str
    name: str
    arguments: str
    kind: ToolKind = "function"


@dataclass(frozen=True, slots=True)
class CompletedMessage:
    """One complete choice. `scored`: log-probabilities of its prompt, if requested."""

    text: str
    reasoning: str
    calls: tuple[CompletedToolCall, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    ended: ChoiceEnd
    scored: PromptScored | None = None

    @property
    def scores(self) -> int:
        """Number of tokens with log-probabilities, including the prompt's."""
        return len(self.logprobs) + (0 if self.scored is None else len(self.scored.entries))


@dataclass(slots=True)
class MessageBuilder:
    """A choice under construction."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    call_starts: list[ToolCallStart] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: ChoiceEnd | None = None
    scored: PromptScored | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.tokens.extend(delta.tokens)
        self.logprobs.extend(delta.logprobs)
        for part in delta.deltas:
            self._add(part)

    def _add(self, part: AnswerDelta) -> None:
        match part:
            case TextDelta(text):
                self.text.append(text)
            case ReasoningDelta(text):
                self.reasoning.append(text)
            case ToolCallStart():
                self.call_starts.append(part)
                self.arguments.append([])
            case ToolCallDelta(index, text):
                self.arguments[index].append(text)

    def calls(self, turn: ChatTurn, index: int) -> tuple[CompletedToolCall, ...]:
        """Tool calls so far, of choice number `index`."""
        pairs = zip(self.call_starts, self.arguments, strict=True)
        return tuple(
            CompletedToolCall(turn.call_id(index, call.index), call.name, "".join(parts), call.kind)
            for call, parts in pairs
        )


async def collect_messages(turn: ChatTurn, events: ChoiceEvents) -> list[CompletedMessage]:
    """All choices in order. ApiError if the request timed out before its first token."""
    builders = [MessageBuilder() for _ in turn.requests]
    async for index, event in parse_choices(turn, in_batches(events)):
        match event:
            case ChoiceDelta():
                builders[index].add(event)
            case EarlierDelta(delta):
                builders[index].add(delta)
            case ChoiceEnd():
                builders[index].ended = event
            case PromptScored():
                builders[index].scored = event
    messages = [_completed(turn, index, choice) for index, choice in enumerate(builders)]
    check_deadline([reply.ended.finished for reply in messages])
    return messages


def _completed(turn: ChatTurn, index: int, choice: MessageBuilder) -> CompletedMessage:
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
