"""Pooling of the last layer's hidden states into one vector for a prompt, chunk by chunk."""

from __future__ import annotations

from torch import Tensor

from engine.sample.logprobs import at_least_float32
from engine.types.events import Embedded
from engine.types.request import Pooling


class PromptPooler:
    """The vector of a prompt of `length` tokens: the last token's hidden state, or the mean of all."""

    def __init__(self, kind: Pooling, length: int) -> None:
        self._kind, self._length = kind, length
        self._added = 0
        self._sum: Tensor | None = None

    @property
    def next_position(self) -> int:
        """The first position with a missing state; the last position if none is missing."""
        return min(self._added if self._kind == "mean" else self._length, self._length - 1)

    def state_positions(self, start: int, stop: int) -> range:
        """The positions in [start, stop) with a missing state."""
        return range(max(start, self.next_position), min(stop, self._length))

    def add(self, states: Tensor) -> None:
        """Add the hidden states [tokens, width] of the next positions."""
        self._added += states.shape[0]
        total = at_least_float32(states).sum(0)
        self._sum = total if self._sum is None else self._sum + total

    def event(self) -> Embedded:
        """The vector, after all states were added."""
        assert self._sum is not None, "a prompt has a last token"
        return Embedded((self._sum / self._added).float().cpu().numpy().astype("<f4").tobytes())
