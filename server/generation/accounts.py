"""What the choices of a stream cost, as its chunks tell it: at the end, or all the time where that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired

from typing_extensions import TypedDict

from engine.types.events import Finished, Progress, Started
from engine.types.request import Request
from server.generation.usage import Meter, timings, usage
from server.schemas.common import Generation, TimingsBody, UsageBody
from server.schemas.common import Progress as ProgressBody


class Costed(TypedDict):
    """The part of a chunk that tells of costs."""

    usage: NotRequired[UsageBody | None]
    timings: NotRequired[TimingsBody]
    prompt_progress: NotRequired[ProgressBody]


class Accounts:
    """One stream; `width`: choices of each prompt, whose tokens count once."""

    def __init__(self, body: Generation, requests: Sequence[Request], width: int) -> None:
        self._body, self._width = body, width
        self._meters = [Meter(len(request.prompt)) for request in requests]
        self._finished: dict[int, Finished] = {}
        self._reasoning_tokens = 0

    @property
    def telling(self) -> bool:
        """Whether chunks of text tell costs that change."""
        return self._body.continuous_usage or bool(self._body.timings_per_token)

    def start(self, index: int, event: Started) -> None:
        """A choice has begun."""
        self._meters[index].start(event)

    def say(self, index: int, tokens: int) -> None:
        """A choice has said so many tokens."""
        self._meters[index].say(tokens)

    def end(self, index: int, finished: Finished, reasoning_tokens: int = 0) -> None:
        """A choice is over."""
        self._finished[index] = finished
        self._meters[index].say(len(finished.tokens))
        self._reasoning_tokens += reasoning_tokens

    def announce(self, chunk: Costed) -> None:
        """What every chunk says, where a last one will tell the usage."""
        if self._body.include_usage:
            chunk["usage"] = None

    def tell(self, chunk: Costed, index: int) -> None:
        """What a chunk of a choice says of what was used so far."""
        if self._body.continuous_usage:
            chunk["usage"] = usage(self._groups([meter.reading() for meter in self._meters]))
        if self._body.timings_per_token:
            chunk["timings"] = timings(self._meters[index].reading())

    def progress(self, chunk: Costed, index: int, event: Progress) -> None:
        """How far the prompt of a choice is."""
        chunk["prompt_progress"] = self._meters[index].progress(event)

    def close(self, chunk: Costed) -> None:
        """What the last chunk of the only choice says, unless a chunk of its own will."""
        if not self._body.include_usage:
            self._add_timings(chunk)

    def total(self, chunk: Costed) -> None:
        """What all of it has cost."""
        finished = [self._finished[index] for index in range(len(self._meters))]
        chunk["usage"] = usage(self._groups(finished), self._reasoning_tokens)
        self._add_timings(chunk)

    def _add_timings(self, chunk: Costed) -> None:
        # Those of several choices overlap and add up to nothing that was ever measured.
        if len(self._meters) == 1:
            chunk["timings"] = timings(self._finished[0])

    def _groups(self, finished: Sequence[Finished]) -> list[Sequence[Finished]]:
        return [finished[start : start + self._width] for start in range(0, len(finished), self._width)]
