"""A prompt as one vector, made of the last layer's states while the prompt is computed, whatever its chunks."""

from __future__ import annotations

from torch import Tensor

from engine.sample.logprobs import at_least_float32
from engine.types.events import Embedded
from engine.types.request import Pooling


class PromptPooler:
    """What becomes the vector of a prompt of `length` tokens: its last token's state, or the mean of all."""

    def __init__(self, kind: Pooling, length: int) -> None:
        self._kind, self._length = kind, length
        self._added = 0
        self._sum: Tensor | None = None

    @property
    def next_position(self) -> int:
        """The first position whose row is still needed; that of the last token where none is."""
        return min(self._added if self._kind == "mean" else self._length, self._length - 1)

    def state_positions(self, start: int, stop: int) -> range:
        """The positions in [start, stop) whose states are needed, in order."""
        return range(max(start, self.next_position), min(stop, self._length))

    def add(self, states: Tensor) -> None:
        """Take the states [rows, width] of the next rows."""
        self._added += states.shape[0]
        more = at_least_float32(states).sum(0)
        self._sum = more if self._sum is None else self._sum + more

    def event(self) -> Embedded:
        """The vector, once all rows have come."""
        assert self._sum is not None, "a prompt has a last token"
        return Embedded((self._sum / self._added).float().cpu().numpy().astype("<f4").tobytes())
