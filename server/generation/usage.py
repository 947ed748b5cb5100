"""What an answer cost, as the client reads it: tokens under OpenAI's names, times under llama.cpp's."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.types.events import Finished, PrefillProgress, Started, Timings, Usage
from server.schemas.common import PromptProgress as ProgressBody
from server.schemas.common import TimingsBody, UsageBody


def usage(prompts: Sequence[Sequence[Finished]], reasoning_tokens: int = 0) -> UsageBody:
    """What all choices together cost: of each prompt its choices, which share it, so that it is counted once."""
    said = [event.usage for choices in prompts for event in choices]
    prompt = sum(choices[0].usage.prompt_tokens for choices in prompts)
    # Of the choices of one prompt the first computes it, and the others find it.
    cached = sum(min(event.usage.cached_tokens for event in choices) for choices in prompts)
    completion = sum(cost.completion_tokens for cost in said)
    body = UsageBody(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details={"cached_tokens": cached, "cache_write_tokens": prompt - cached},
        completion_tokens_details={
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": sum(cost.accepted_tokens for cost in said),
            "rejected_prediction_tokens": sum(cost.rejected_tokens for cost in said),
        },
    )
    shifts = sum(cost.context_shifts for cost in said)
    if shifts > 0:
        body["context_shifts"] = shifts
        body["shifted_tokens"] = sum(cost.shifted_tokens for cost in said)
    return body


def cache_write_tokens(finished: Finished) -> int:
    """Tokens of the prompt that were computed, and so remembered."""
    return finished.usage.prompt_tokens - finished.usage.cached_tokens


def timings(finished: Finished) -> TimingsBody:
    """Where the time of one choice went."""
    cost, times = finished.usage, finished.timings
    computed = cost.prompt_tokens - cost.cached_tokens
    return TimingsBody(
        queue_ms=_milliseconds(times.queue_seconds),
        cache_n=cost.cached_tokens,
        prompt_n=computed,
        prompt_ms=_milliseconds(times.prompt_seconds),
        prompt_per_token_ms=_milliseconds(_ratio(times.prompt_seconds, computed)),
        prompt_per_second=round(_ratio(computed, times.prompt_seconds), 3),
        predicted_n=cost.completion_tokens,
        predicted_ms=_milliseconds(times.generation_seconds),
        predicted_per_token_ms=_milliseconds(_ratio(times.generation_seconds, cost.completion_tokens)),
        predicted_per_second=round(_ratio(cost.completion_tokens, times.generation_seconds), 3),
        draft_n=cost.accepted_tokens + cost.rejected_tokens,
        draft_n_accepted=cost.accepted_tokens,
    )


class ChoiceUsage:
    """What one choice has cost so far, by the clock of this side: for answers that tell it as they go."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt, self._cached, self._said = prompt_tokens, 0, 0
        self._begin = time.monotonic()
        self._started = self._first = self._begin

    def start(self, event: Started) -> None:
        """The choice has a slot."""
        self._started = self._first = time.monotonic()
        self._cached = event.cached_tokens

    def add_tokens(self, tokens: int) -> None:
        """It has said more."""
        if not self._said:
            self._first = time.monotonic()
        self._said += tokens

    def progress(self, event: PrefillProgress) -> ProgressBody:
        """How far its prompt is."""
        return ProgressBody(
            total=event.prompt_tokens,
            cache=self._cached,
            processed=event.computed,
            time_ms=_milliseconds(time.monotonic() - self._started),
        )

    def current(self) -> Finished:
        """As if it ended now."""
        times = Timings(
            queue_seconds=self._started - self._begin,
            prompt_seconds=self._first - self._started,
            generation_seconds=time.monotonic() - self._first,
        )
        return Finished("stop", None, Usage(self._prompt, self._said, self._cached), times)


def _ratio(amount: float, by: float) -> float:
    return amount / by if by > 0 else 0.0


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
