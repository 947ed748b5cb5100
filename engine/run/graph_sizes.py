"""The sizes of recorded steps: some numbers of tokens, and powers of two of the context."""

from __future__ import annotations

from collections.abc import Iterator

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
# Positions of the shortest recorded steps.
_MIN_POSITIONS = 512


def batch_size(tokens: int) -> int:
    """The size of the recorded step for some tokens, which are at most the last of BATCH_SIZES."""
    return next(size for size in BATCH_SIZES if size >= tokens)


def positions(longest: int, capacity: int) -> int:
    """The positions of the recorded step for sequences of up to `longest` tokens."""
    return min(max(1 << (longest - 1).bit_length(), _MIN_POSITIONS), capacity)


def all_sizes(tokens: int, capacity: int) -> Iterator[tuple[int, int]]:
    """Batch size and positions of all recorded steps of up to `tokens` tokens; the largest first.

    The memory of a recording serves the smaller ones after it.
    """
    contexts = sorted({positions(1 << bit, capacity) for bit in range(capacity.bit_length() + 1)}, reverse=True)
    largest = batch_size(min(tokens, BATCH_SIZES[-1]))
    for size in reversed(BATCH_SIZES):
        if size <= largest:
            yield from ((size, context) for context in contexts)
