"""From events to whole choices: what an answer in one piece is made of, and what a stream adds up to."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.types import Delta, Finished, TokenLogprob
from server.generation import Events


@dataclass(frozen=True, slots=True)
class Choice:
    """One generation that ended well."""

    text: str
    logprobs: tuple[TokenLogprob, ...]
    finished: Finished


@dataclass(slots=True)
class _Growing:
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished | None = None


async def fold(events: Events, choices: int) -> list[Choice]:
    """Take all events of `choices` generations; what a Failed one raises passes through."""
    growing = [_Growing() for _ in range(choices)]
    async for index, event in events:
        match event:
            case Delta():
                growing[index].text.append(event.text)
                growing[index].logprobs.extend(event.logprobs)
            case Finished():
                growing[index].finished = event
    return [_whole(choice) for choice in growing]


def _whole(choice: _Growing) -> Choice:
    assert choice.finished is not None, "the engine ends every stream with Finished or Failed"
    return Choice("".join(choice.text), tuple(choice.logprobs), choice.finished)
