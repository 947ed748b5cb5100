"""What an answer cost, as the client reads it: tokens under OpenAI's names, times under llama.cpp's."""

from __future__ import annotations

from collections.abc import Sequence

from engine.types import Finished
from server.schemas.common import TimingsBody, UsageBody


def usage(finished: Sequence[Finished]) -> UsageBody:
    """What all choices together cost."""
    prompt = sum(event.usage.prompt_tokens for event in finished)
    completion = sum(event.usage.completion_tokens for event in finished)
    body = UsageBody(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details={"cached_tokens": sum(event.usage.cached_tokens for event in finished)},
        completion_tokens_details={
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": sum(event.usage.accepted_tokens for event in finished),
            "rejected_prediction_tokens": sum(event.usage.refused_tokens for event in finished),
        },
    )
    shifts = sum(event.usage.context_shifts for event in finished)
    if shifts > 0:
        body["context_shifts"] = shifts
        body["shifted_tokens"] = sum(event.usage.shifted_tokens for event in finished)
    return body


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
        draft_n=cost.accepted_tokens + cost.refused_tokens,
        draft_n_accepted=cost.accepted_tokens,
    )


def _ratio(amount: float, by: float) -> float:
    return amount / by if by > 0 else 0.0


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
