"""Token usage and timings in the chunks of a stream: in the last chunk, or in every chunk if requested."""

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
    """Usage fields of a chunk."""

    usage: NotRequired[UsageBody | None]
    timings: NotRequired[TimingsBody]
    prompt_progress: NotRequired[ProgressBody]


class StreamUsage:
    """Usage of all choices of one stream; prompt tokens count once per `width` choices."""

    def __init__(self, body: Generation, requests: Sequence[Request], width: int) -> None:
        self._body, self._width = body, width
        self._contents = requests[0].contents
        self._choices = [ChoiceUsage(len(request.prompt)) for request in requests]
        self._finished: dict[int, Finished] = {}
        self._reasoning_tokens = 0

    @property
    def reports_continuously(self) -> bool:
        """Whether chunks of text have usage or timings."""
        return self._body.continuous_usage or bool(self._body.timings_per_token)

    def start(self, index: int, event: Started) -> None:
        self._choices[index].start(event)

    def add_tokens(self, index: int, tokens: int) -> None:
        self._choices[index].add_tokens(tokens)

    def end(self, index: int, finished: Finished, reasoning_tokens: int = 0) -> None:
        self._finished[index] = finished
        self._choices[index].add_tokens(len(finished.tokens))
        self._reasoning_tokens += reasoning_tokens

    def add_placeholder(self, chunk: UsageFields) -> None:
        """`usage: null` in each chunk if the last chunk has the usage (OpenAI's `include_usage`)."""
        if self._body.include_usage:
            chunk["usage"] = None

    def add_usage(self, chunk: UsageFields, index: int) -> None:
        """Usage and timings up to this chunk of a choice, if requested."""
        if self._body.continuous_usage:
            chunk["usage"] = usage(
                self._groups([choice.current() for choice in self._choices]), contents=self._contents
            )
        if self._body.timings_per_token:
            chunk["timings"] = timings(self._choices[index].current())

    def add_progress(self, chunk: UsageFields, index: int, event: PrefillProgress) -> None:
        chunk["prompt_progress"] = self._choices[index].progress(event)

    def add_final_timings(self, chunk: UsageFields) -> None:
        """Timings in the last chunk of a choice, unless a separate usage chunk follows."""
        if not self._body.include_usage:
            self._add_timings(chunk)

    def add_total(self, chunk: UsageFields) -> None:
        """Usage and timings of the complete stream."""
        finished = [self._finished[index] for index in range(len(self._choices))]
        chunk["usage"] = usage(self._groups(finished), self._reasoning_tokens, self._contents)
        self._add_timings(chunk)

    def _add_timings(self, chunk: UsageFields) -> None:
        # Choices run concurrently: the sum of their times has no meaning.
        if len(self._choices) == 1:
            chunk["timings"] = timings(self._finished[0])

    def _groups(self, finished: Sequence[Finished]) -> list[Sequence[Finished]]:
        return [finished[start : start + self._width] for start in range(0, len(finished), self._width)]
