"""The times of one generation."""

from __future__ import annotations

import time
from dataclasses import dataclass

from prometheus_client import Histogram

from engine.types.events import Delta, Event, Failed, Finished, Started

# Between two steps the processor caches hold none of a histogram's code: one observation takes 20 microseconds then,
# and a batch of them hardly more.
OBSERVATION_BATCH = 32


@dataclass(frozen=True, slots=True)
class RequestHistograms:
    """The histograms of requests, in seconds and tokens."""

    queue: Histogram
    prefill: Histogram
    decode: Histogram
    first_token: Histogram
    inter_token: Histogram
    prompt_tokens: Histogram
    generated_tokens: Histogram


class GenerationTimer:
    """The times and lengths of one generation.

    Inter-token latencies are added to their histogram in batches, the last batch by `flush`.

    started           time of admission (time.monotonic)
    slot_at           time when its first event arrived, after it got a slot
    first_token_at    time of the first text
    finished          its last event
    generated_tokens  of the deltas so far
    """

    def __init__(self, histograms: RequestHistograms) -> None:
        self._histograms = histograms
        self.started = time.monotonic()
        self.reason = "cancelled"
        self.slot_at: float | None = None
        self.first_token_at: float | None = None
        self.finished: Finished | None = None
        self.generated_tokens = 0
        self._latest: float | None = None
        self._pending: list[float] = []

    def flush(self) -> None:
        """Add pending latencies to their histogram."""
        for seconds in self._pending:
            self._histograms.inter_token.observe(seconds)
        self._pending.clear()

    def observe(self, event: Event) -> None:
        """Observe an event."""
        match event:
            case Delta():
                self.observe_delta(event)
            case Started():
                self.slot_at = time.monotonic()
            case Finished():
                self._finish(event)
            case Failed():
                self.reason = "error"

    def observe_delta(self, delta: Delta) -> None:
        """Observe a delta."""
        now, tokens = time.monotonic(), len(delta.tokens)
        self.generated_tokens += tokens
        if self._latest is None:
            self.first_token_at = now
            self._histograms.first_token.observe(now - self.started)
        elif tokens:
            # A merged delta, of a slow reader, counts with its mean latency.
            self._pending.append((now - self._latest) / tokens)
            if len(self._pending) == OBSERVATION_BATCH:
                self.flush()
        self._latest = now

    def _finish(self, event: Finished) -> None:
        self.reason, self.finished = event.reason, event
        self._histograms.prompt_tokens.observe(event.usage.prompt_tokens)
        self._histograms.generated_tokens.observe(event.usage.completion_tokens)
        self._histograms.queue.observe(event.timings.queue_seconds)
        self._histograms.prefill.observe(event.timings.prompt_seconds)
        self._histograms.decode.observe(event.timings.generation_seconds)
