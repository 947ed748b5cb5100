"""The limits of an API key: requests and tokens a minute, and requests at the same time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from server.configuration.key_file import KeyEntry
from server.http.errors import KEY_LIMIT_REACHED, ApiError

LIMIT_HEADERS = tuple(
    f"x-ratelimit-{value}-{name}" for name in ("requests", "tokens") for value in ("limit", "remaining", "reset")
)


class KeyLimitReached(ApiError):
    """A request exceeds a limit of its key."""


class TokenBucket:
    """Holds the amount of a minute, and refills evenly; empty, it may have a debt."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock, self._level, self._filled_at = clock, float(per_minute), clock()

    def change(self, per_minute: int) -> None:
        """Refill by another amount from now on. What is left, and a debt, stay."""
        self.level()
        self.per_minute = per_minute

    def level(self) -> float:
        """The amount that is left; below zero: a debt."""
        now = self._clock()
        self._level = min(self._level + (now - self._filled_at) * self.per_minute / 60, self.per_minute)
        self._filled_at = now
        return self._level

    def take(self, amount: int) -> None:
        """Take an amount, also one that is not left."""
        self._level = self.level() - amount

    def seconds_until(self, amount: float) -> float:
        """The time until this amount is left."""
        return max(amount - self.level(), 0.0) * 60 / self.per_minute


class _OpenRequest:
    """A request that counts for `streams` until its response and its background response have ended."""

    def __init__(self, limits: KeyLimits) -> None:
        self._limits, self._holders = limits, 0
        self.hold()

    def hold(self) -> None:
        self._limits.open_requests += not self._holders
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        self._limits.open_requests -= not self._holders


# Tasks of a request inherit it.
_open_request: ContextVar[_OpenRequest | None] = ContextVar("open_request", default=None)


def hold_open() -> Callable[[], None]:
    """Count the current request as open, also after its response, until the returned function is called once."""
    request = _open_request.get()
    if request is None:
        return lambda: None
    request.hold()
    return request.release


class KeyLimits:
    """Counts what a key uses, and refuses what exceeds its limits. Belongs to the event loop's thread.

    open_requests  those that are running now
    """

    def __init__(self, entry: KeyEntry, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self.open_requests = clock, 0
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.change(entry)

    def change(self, entry: KeyEntry) -> None:
        """Apply the limits of a changed entry. What the key has used, and its open requests, still count."""
        self._requests = _changed(self._requests, entry.requests_per_minute, self._clock)
        self._tokens = _changed(self._tokens, entry.tokens_per_minute, self._clock)
        self._max_streams = entry.streams

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request as open inside the block; KeyLimitReached if it exceeds a limit."""
        if self._max_streams is not None and self.open_requests >= self._max_streams:
            raise self._refusal(f"{self._max_streams} requests at the same time", 1.0)
        # A prompt has at least one token.
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None and (seconds := bucket.seconds_until(1)):
                raise self._refusal(f"{bucket.per_minute} {name} per minute", seconds)
        if self._requests is not None:
            self._requests.take(1)
        request = _OpenRequest(self)
        token = _open_request.set(request)
        try:
            yield
        finally:
            _open_request.reset(token)
            request.release()

    def charge(self, tokens: int) -> None:
        """Count tokens of a prompt or an answer."""
        if self._tokens is not None:
            self._tokens.take(tokens)

    def headers(self) -> dict[str, str]:
        """OpenAI's headers about limits by the minute; a reset is the time until nothing is used."""
        headers = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(math.floor(bucket.level()), 0))
                headers[f"x-ratelimit-reset-{name}"] = f"{bucket.seconds_until(bucket.per_minute):.3f}s"
        return headers

    def _refusal(self, limit: str, seconds: float) -> KeyLimitReached:
        message = f"This API key is limited to {limit}."
        return KeyLimitReached(KEY_LIMIT_REACHED, message, headers={"Retry-After": str(max(math.ceil(seconds), 1))})


def _changed(bucket: TokenBucket | None, per_minute: int | None, clock: Callable[[], float]) -> TokenBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket(per_minute, clock)
    bucket.change(per_minute)
    return bucket
