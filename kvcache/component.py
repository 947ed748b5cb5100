"""What each kind of memory in a slot can do: attention cells (attention.py) and recurrent states (recurrent.py).

The cache asks all components first (`resume_length`, `check_append`, `check_shift`, `check_load`) and changes them only when
all agree, so that a refused operation leaves every one of them as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, TypeVar

from torch import Tensor

from kvcache.spec import Span

# What a component holds of a stretch of tokens: cells with holes (kvcache/holes.py), or marks (kvcache/recurrent.py).
References = TypeVar("References")
# What a component saves of a stretch: tensors on the CPU, by name.
SavedTensors: TypeAlias = dict[str, Tensor]


class CacheComponent(Protocol[References]):
    """One kind of memory, for all slots. Lengths are tokens from the start of the slot."""

    def length(self, slot: int) -> int:
        """Tokens that the slot holds."""
        ...

    def resume_length(self, slot: int, length: int) -> int:
        """The deepest length, at most the one asked for, at which the slot's content could go on.

        A slot holds what it needs to go on from its own length; what only shorter ones need it may have released.
        """
        ...

    def truncate(self, slot: int, length: int) -> None:
        """Forget everything from `length` on."""
        ...

    def check_append(self, spans: Sequence[Span]) -> None:
        """Raise OutOfCells if the rows of the spans would not fit even once `append` released what they do not see."""
        ...

    def append(self, spans: Sequence[Span]) -> None:
        """Make room for the rows of the spans; `truncate` gives back what is not kept.

        What rows from a span's start on do not see is released first. It is not released when a forward ends, so that
        what a forward computed can be held as a whole after it.
        """
        ...

    def release_out_of_reach(self) -> None:
        """Release what no later row of any slot will see, as `append` would, so that it is the tree's alone."""
        ...

    def can_shift(self, slot: int, keep: int, drop: int) -> bool:
        """Whether what follows [keep, keep + drop) can move by -drop, and go on from there."""
        ...

    def check_shift(self, slot: int, keep: int, drop: int) -> None:
        """Raise OutOfCells if the move does not fit."""
        ...

    def shift(self, slot: int, keep: int, drop: int) -> None:
        """Forget [keep, keep + drop) and move what follows by -drop."""
        ...

    def acquire(self, slot: int, start: int, stop: int) -> References:
        """Reference what the slot has for [start, stop), so that it outlives the slot; holes where it released it."""
        ...

    def release(self, references: References) -> None:
        """Drop the references of `acquire`."""
        ...

    def trim(self, references: References, start: int) -> References:
        """Release all but what it takes to go on at the end of the stretch, which begins at `start`; what stays."""
        ...

    def can_trim(self, references: References, start: int) -> bool:
        """Whether `trim` would release anything."""
        ...

    def slice(self, references: References, start: int, stop: int) -> References:
        """The share of a stretch's tokens [start, stop); the references are divided, not added to."""
        ...

    def concat(self, first: References, second: References) -> References:
        """Two stretches that follow each other as one."""
        ...

    def resume_depth(self, ranges: Sequence[tuple[int, References]], cached_length: int, length: int) -> int:
        """The deepest position up to `length` from which a slot could go on that stands at `cached_length` now.

        stretches  what is held from the start on, each with the position where it begins
        """
        ...

    def attach(self, slot: int, references: References) -> None:
        """Append a held stretch to the slot, sharing it; it is the content that follows there."""
        ...

    def freeable(self, references: References) -> int:
        """What would come free if the stretch were released now: cells, or bytes of a component without cells."""
        ...

    def over_budget(self) -> int:
        """By how much the held content exceeds what the component may hold, as `freeable` counts; 0 for cells."""
        ...

    def unused_by_slots(self, references: References) -> int:
        """Cells of the stretch that no slot uses: they come free once everyone who holds them has released them."""
        ...

    def save(self, references: References) -> SavedTensors:
        """A stretch's content as tensors on the CPU by name: copies, which need neither cells nor slots."""
        ...

    def check_load(self, content: SavedTensors, start: int, stop: int) -> None:
        """Raise OutOfCells if that share of a saved stretch does not fit."""
        ...

    def placeholder(self, content: SavedTensors, length: int) -> References:
        """What `load` would return for a saved stretch of `length` tokens, enough for `deepest`; it holds nothing."""
        ...

    def load(self, content: SavedTensors, start: int, stop: int) -> References:
        """The tokens [start, stop) of a saved stretch, counted from its start, in fresh cells referenced once.

        Raises OutOfCells, changing nothing. The content is not kept.
        """
        ...
