"""What the choices of a stream cost, as its chunks tell it: at the end, or all the time where that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired

from typing_extensions import TypedDict

from engine.types.events import Finished, PrefillProgress, Started
from engine.types.request import Request
from server.generation.usage import ChoiceUsage, timings, usage
from server.schemas.common import Generation, TimingsBody, UsageBody
from server.schemas.common import PromptProgress as ProgressBody


class UsageFields(TypedDict):
    """The part of a chunk that tells of costs."""

    usage: NotRequired[UsageBody | None]
    timings: NotRequired[TimingsBody]
    prompt_progress: NotRequired[ProgressBody]


class StreamUsage:
    """One stream; `width`: choices of each prompt, whose tokens count once."""

    def __init__(self, body: Generation, requests: Sequence[Request], width: int) -> None:
        self._body, self._width = body, width
        self._meters = [ChoiceUsage(len(request.prompt)) for request in requests]
        self._finished: dict[int, Finished] = {}
        self._reasoning_tokens = 0

    @property
    def reports_continuously(self) -> bool:
        """Whether chunks of text tell costs that change."""
        return self._body.continuous_usage or bool(self._body.timings_per_token)

    def start(self, index: int, event: Started) -> None:
        """A choice has begun."""
        self._meters[index].start(event)

    def add_tokens(self, index: int, tokens: int) -> None:
        """A choice has said so many tokens."""
        self._meters[index].add_tokens(tokens)

    def end(self, index: int, finished: Finished, reasoning_tokens: int = 0) -> None:
        """A choice is over."""
        self._finished[index] = finished
        self._meters[index].add_tokens(len(finished.tokens))
        self._reasoning_tokens += reasoning_tokens

    def add_placeholder(self, chunk: UsageFields) -> None:
        """What every chunk says, where a last one will tell the usage."""
        if self._body.include_usage:
            chunk["usage"] = None

    def add_usage(self, chunk: UsageFields, index: int) -> None:
        """What a chunk of a choice says of what was used so far."""
        if self._body.continuous_usage:
            chunk["usage"] = usage(self._groups([meter.current() for meter in self._meters]))
        if self._body.timings_per_token:
            chunk["timings"] = timings(self._meters[index].current())

    def add_progress(self, chunk: UsageFields, index: int, event: PrefillProgress) -> None:
        """How far the prompt of a choice is."""
        chunk["prompt_progress"] = self._meters[index].progress(event)

    def add_final(self, chunk: UsageFields) -> None:
        """What the last chunk of the only choice says, unless a chunk of its own will."""
        if not self._body.include_usage:
            self._add_timings(chunk)

    def total(self, chunk: UsageFields) -> None:
        """What all of it has cost."""
        finished = [self._finished[index] for index in range(len(self._meters))]
        chunk["usage"] = usage(self._groups(finished), self._reasoning_tokens)
        self._add_timings(chunk)

    def _add_timings(self, chunk: UsageFields) -> None:
        # Those of several choices overlap and add up to nothing that was ever measured.
        if len(self._meters) == 1:
            chunk["timings"] = timings(self._finished[0])

    def _groups(self, finished: Sequence[Finished]) -> list[Sequence[Finished]]:
        return [finished[start : start + self._width] for start in range(0, len(finished), self._width)]
