"""What every kind of memory in a slot can do: attention cells now; recurrent rows, encoder entries and drafts alike.

The cache asks all components first (`standing`, `check_append`, `check_shift`) and changes them only when all agree,
so that a refused operation leaves every one of them as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvcache.spec import Span


class Component(Protocol):
    """One kind of memory, for all slots. Lengths are tokens from the start of the slot."""

    def length(self, slot: int) -> int:
        """Tokens that the slot holds."""
        ...

    def standing(self, slot: int, length: int) -> int:
        """The deepest length, at most the one asked for, at which the slot's content could go on."""
        ...

    def share(self, source: int, target: int, length: int) -> None:
        """Make `target` hold the first `length` tokens of `source`, which stays as it is."""
        ...

    def truncate(self, slot: int, length: int) -> None:
        """Forget everything from `length` on."""
        ...

    def check_append(self, spans: Sequence[Span]) -> None:
        """Raise OutOfCells if the rows of the spans do not fit."""
        ...

    def append(self, spans: Sequence[Span]) -> None:
        """Make room for the rows of the spans; `truncate` gives back what is not kept."""
        ...

    def can_shift(self, slot: int) -> bool:
        """Whether the slot's content can move to other positions."""
        ...

    def check_shift(self, slot: int, keep: int, drop: int) -> None:
        """Raise OutOfCells if the move does not fit."""
        ...

    def shift(self, slot: int, keep: int, drop: int) -> None:
        """Forget [keep, keep + drop) and move what follows by -drop."""
        ...
