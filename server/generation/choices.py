"""Collects the events of completion choices into complete choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import anyio.to_thread

from engine.types.events import Delta, Finished, PromptScored, Started, TokenLogprob
from server.http.events import ChoiceEvents, in_batches

Answer = TypeVar("Answer")
MAX_INLINE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class CompletedChoice:
    """One complete choice. `scored`: log-probabilities of its prompt, if requested.

    logprobs  of the tokens of the text, followed by the end token's
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finished: Finished
    scored: PromptScored | None

    @property
    def scores(self) -> int:
        """Number of tokens with log-probabilities, including the prompt's."""
        return len(self.logprobs) + (0 if self.scored is None else len(self.scored.entries))

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the generated tokens."""
        return sum(token.chosen.logprob for token in self.logprobs) / max(len(self.logprobs), 1)


@dataclass(slots=True)
class _PartialChoice:
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished | None = None
    scored: PromptScored | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.tokens.extend(delta.tokens)
        self.logprobs.extend(delta.logprobs)


async def collect_choices(events: ChoiceEvents, choices: int) -> list[CompletedChoice]:
    """Consume all events of `choices` choices; errors of the stream are raised."""
    partial = [_PartialChoice() for _ in range(choices)]
    async for index, event in in_batches(events):
        match event:
            case Started():
                for delta in event.earlier:
                    partial[index].add(delta)
            case Delta():
                partial[index].add(event)
            case Finished():
                partial[index].finished = event
                if event.end_logprob is not None:
                    partial[index].logprobs.append(
                        replace(event.end_logprob, text_offset=sum(map(len, partial[index].text)))
                    )
            case PromptScored():
                partial[index].scored = event
    return [_completed(choice) for choice in partial]


async def assembled(tokens: int, work: Callable[[], Answer]) -> Answer:
    """The result of `work`, run in a worker thread if it formats more than MAX_INLINE_TOKENS log-probabilities."""
    return work() if tokens <= MAX_INLINE_TOKENS else await anyio.to_thread.run_sync(work)


def _completed(choice: _PartialChoice) -> CompletedChoice:
    assert choice.finished is not None, "the engine ends every stream with Finished or Failed"
    text, tokens, logprobs = "".join(choice.text), tuple(choice.tokens), tuple(choice.logprobs)
    return CompletedChoice(text, tokens, logprobs, choice.finished, choice.scored)
