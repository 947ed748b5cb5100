"""What every kind of memory in a slot can do: attention cells now; recurrent rows, encoder entries and drafts alike.

The cache asks all components first (`standing`, `check_append`, `check_shift`) and changes them only when all agree,
so that a refused operation leaves every one of them as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from kvcache.spec import Span

# What the prefix tree holds of one component for a stretch of tokens.
Held = TypeVar("Held")


class Component(Protocol[Held]):
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

    def hold(self, slot: int, start: int, stop: int) -> Held:
        """Reference what the slot has for [start, stop), so that it outlives the slot."""
        ...

    def release(self, held: Held) -> None:
        """Drop the references of `hold`."""
        ...

    def part(self, held: Held, start: int, stop: int) -> Held:
        """The share of a stretch's tokens [start, stop); the references are divided, not added to."""
        ...

    def joined(self, first: Held, second: Held) -> Held:
        """Two stretches that follow each other as one."""
        ...

    def reach(self, stretches: Sequence[tuple[int, Held]], standing: int, length: int) -> int:
        """The deepest position up to `length` from which a slot could go on that stands at `standing` now.

        stretches  what is held from the start on, each with the position where it begins
        """
        ...

    def restore(self, slot: int, held: Held) -> None:
        """Append a held stretch to the slot, sharing it; it is the content that follows there."""
        ...

    def freeable(self, held: Held) -> int:
        """Cells that would come free if the stretch were released now."""
        ...

    def surplus(self) -> int:
        """By how much the held content exceeds what the component may hold; cells have no such limit."""
        ...
