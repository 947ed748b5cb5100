"""From events to whole choices: what a completion in one piece is made of, and what a stream adds up to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import anyio.to_thread

from engine.types.events import Delta, Finished, PromptScored, TokenLogprob
from server.http.events import ChoiceEvents

Answer = TypeVar("Answer")
MAX_INLINE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class CompletedChoice:
    """One generation that ended well. `scored` is its prompt's, where it was asked for.

    logprobs  of the tokens of the text and, behind them, of the one that ended it
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finished: Finished
    scored: PromptScored | None

    @property
    def scores(self) -> int:
        """Its tokens with log-probabilities, those of the prompt too."""
        return len(self.logprobs) + (0 if self.scored is None else len(self.scored.entries))

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens."""
        return sum(token.chosen.logprob for token in self.logprobs) / max(len(self.logprobs), 1)


@dataclass(slots=True)
class _PartialChoice:
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished | None = None
    scored: PromptScored | None = None


async def collect_choices(events: ChoiceEvents, choices: int) -> list[CompletedChoice]:
    """Take all events of `choices` generations; what a Failed one raises passes through."""
    growing = [_PartialChoice() for _ in range(choices)]
    async for index, event in events:
        match event:
            case Delta():
                growing[index].text.append(event.text)
                growing[index].tokens.extend(event.tokens)
                growing[index].logprobs.extend(event.logprobs)
            case Finished():
                growing[index].finished = event
                if event.end_logprob is not None:
                    growing[index].logprobs.append(
                        replace(event.end_logprob, text_offset=sum(map(len, growing[index].text)))
                    )
            case PromptScored():
                growing[index].scored = event
    return [_whole(choice) for choice in growing]


async def assembled(tokens: int, work: Callable[[], Answer]) -> Answer:
    """The answer that `work` makes; in a worker thread where it tells so many tokens with their log-probabilities."""
    return work() if tokens <= MAX_INLINE_TOKENS else await anyio.to_thread.run_sync(work)


def _whole(choice: _PartialChoice) -> CompletedChoice:
    assert choice.finished is not None, "the engine ends every stream with Finished or Failed"
    text, tokens, logprobs = "".join(choice.text), tuple(choice.tokens), tuple(choice.logprobs)
    return CompletedChoice(text, tokens, logprobs, choice.finished, choice.scored)
