"""Bounds the memory of all sounds that are transcribed at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from server.http.errors import QUEUE_FULL, ApiError

# Features of all sounds: an hour has 110 MiB.
MAX_FEATURE_BYTES = 2**30
_RETRY_SECONDS = 10


class FeatureBudget:
    """Counts the bytes of features in memory."""

    def __init__(self, max_bytes: int = MAX_FEATURE_BYTES) -> None:
        self._max_bytes, self._held_bytes = max_bytes, 0

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Count features inside the block; ApiError beyond the limit, unless they are the only ones."""
        if self._held_bytes and self._held_bytes + size > self._max_bytes:
            message = "Too many sounds are being transcribed."
            raise ApiError(QUEUE_FULL, message, headers={"Retry-After": str(_RETRY_SECONDS)})
        self._held_bytes += size
        try:
            yield
        finally:
            self._held_bytes -= size
