"""Token usage in OpenAI's format and timings in llama.cpp's."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.types.content import Content
from engine.types.events import Finished, PrefillProgress, Started, Timings, Usage
from server.schemas.common import ContentTokens, TimingsBody, UsageBody
from server.schemas.common import PromptProgress as ProgressBody


def usage(
    prompts: Sequence[Sequence[Finished]], reasoning_tokens: int = 0, contents: Sequence[Content] = ()
) -> UsageBody:
    """Usage of all choices, grouped by prompt: choices share their prompt, so its tokens count once.

    contents  of the prompt
    """
    usages = [event.usage for choices in prompts for event in choices]
    prompt = sum(choices[0].usage.prompt_tokens for choices in prompts)
    # The first choice of a prompt computes it, the others find it in the cache.
    cached = sum(min(event.usage.cached_tokens for event in choices) for choices in prompts)
    completion = sum(counts.completion_tokens for counts in usages)
    body = UsageBody(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details={
            "cached_tokens": cached,
            "cache_write_tokens": prompt - cached,
            **content_tokens(contents),
        },
        completion_tokens_details={
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": sum(counts.accepted_tokens for counts in usages),
            "rejected_prediction_tokens": sum(counts.rejected_tokens for counts in usages),
        },
    )
    shifts = sum(counts.context_shifts for counts in usages)
    if shifts > 0:
        body["context_shifts"] = shifts
        body["shifted_tokens"] = sum(counts.shifted_tokens for counts in usages)
    return body


def content_tokens(contents: Sequence[Content]) -> ContentTokens:
    """Prompt tokens of images and sounds; empty without them."""
    counts = ContentTokens()
    if images := sum(content.stop - content.start for content in contents if content.kind == "image"):
        counts["image_tokens"] = images
    if sounds := sum(content.stop - content.start for content in contents if content.kind == "audio"):
        counts["audio_tokens"] = sounds
    return counts


def cache_write_tokens(finished: Finished) -> int:
    """Prompt tokens that were computed, and thus cached."""
    return finished.usage.prompt_tokens - finished.usage.cached_tokens


def timings(finished: Finished) -> TimingsBody:
    """Timings of one choice."""
    counts, times = finished.usage, finished.timings
    computed = counts.prompt_tokens - counts.cached_tokens
    return TimingsBody(
        queue_ms=_milliseconds(times.queue_seconds),
        cache_n=counts.cached_tokens,
        prompt_n=computed,
        prompt_ms=_milliseconds(times.prompt_seconds),
        prompt_per_token_ms=_milliseconds(_ratio(times.prompt_seconds, computed)),
        prompt_per_second=round(_ratio(computed, times.prompt_seconds), 3),
        predicted_n=counts.completion_tokens,
        predicted_ms=_milliseconds(times.generation_seconds),
        predicted_per_token_ms=_milliseconds(_ratio(times.generation_seconds, counts.completion_tokens)),
        predicted_per_second=round(_ratio(counts.completion_tokens, times.generation_seconds), 3),
        draft_n=counts.accepted_tokens + counts.rejected_tokens,
        draft_n_accepted=counts.accepted_tokens,
    )


class ChoiceUsage:
    """Usage of a running choice, by this process's clock."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt, self._cached, self._completion = prompt_tokens, 0, 0
        self._begin = time.monotonic()
        self._started = self._first = self._begin

    def start(self, event: Started) -> None:
        """The choice is scheduled."""
        self._started = self._first = time.monotonic()
        self._cached = event.cached_tokens

    def add_tokens(self, tokens: int) -> None:
        if not self._completion:
            self._first = time.monotonic()
        self._completion += tokens

    def progress(self, event: PrefillProgress) -> ProgressBody:
        """Progress of the prefill."""
        return ProgressBody(
            total=event.prompt_tokens,
            cache=self._cached,
            processed=event.computed,
            time_ms=_milliseconds(time.monotonic() - self._started),
        )

    def current(self) -> Finished:
        """Usage and timings so far."""
        times = Timings(
            queue_seconds=self._started - self._begin,
            prompt_seconds=self._first - self._started,
            generation_seconds=time.monotonic() - self._first,
        )
        return Finished("stop", None, Usage(self._prompt, self._completion, self._cached), times)


def _ratio(amount: float, by: float) -> float:
    return amount / by if by > 0 else 0.0


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
