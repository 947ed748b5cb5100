"""The interface of one kind of slot memory: attention cells (attention_group.py) or recurrent states (recurrent.py).

The cache calls the checks of all components (`resume_length`, `check_append`, `check_shift`, `check_load`) before it
changes any of them: a refused operation leaves all components unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from torch import Tensor

from kvcache.errors import OutOfCells
from kvcache.spec import Span

# References of one component to the content of a token range: cells with holes (attention_group.py), or checkpoints
# (recurrent.py).
References = TypeVar("References")
# The references of all components to one token range, in the order of the components.
ComponentReferences: TypeAlias = list[Any]
# Saved content of a token range: tensors by name, in host memory but for the result of `save`.
SavedTensors: TypeAlias = dict[str, Tensor]


class CacheComponent(Protocol[References]):
    """One kind of memory for all slots. Lengths are tokens from the start of the slot."""

    def length(self, slot: int) -> int:
        """Tokens in the slot."""
        ...

    def resume_length(self, slot: int, length: int) -> int:
        """The largest length up to `length` at which the slot can resume.

        A slot keeps what it needs to resume at its own length; content needed only at smaller lengths may be released.
        """
        ...

    def truncate(self, slot: int, length: int) -> None:
        """Release all content from `length` on."""
        ...

    def check_append(self, spans: Sequence[Span]) -> None:
        """Raise OutOfCells if the tokens of the spans do not fit after the releases of `append`."""
        ...

    def append(self, spans: Sequence[Span]) -> None:
        """Allocate memory for the tokens of the spans; `truncate` releases rejected tokens.

        Content out of reach from the start of a span is released first, not at the end of a forward: until the next
        `append` the whole result of a forward can be acquired.
        """
        ...

    def release_out_of_reach(self) -> None:
        """Release the content of every slot that no later token attends to."""
        ...

    def can_shift(self, slot: int, keep: int, drop: int) -> bool:
        """Whether the content after [keep, keep + drop) can move by -drop and resume there."""
        ...

    def check_shift(self, slot: int, keep: int, drop: int) -> None:
        """Raise OutOfCells if the shift does not fit."""
        ...

    def shift(self, slot: int, keep: int, drop: int) -> None:
        """Release [keep, keep + drop) and move the content after it by -drop."""
        ...

    def acquire(self, slot: int, start: int, stop: int) -> References:
        """Add references to the slot's content of [start, stop), so that it outlives the slot."""
        ...

    def release(self, references: References) -> None:
        """Drop acquired references."""
        ...

    def trim(self, references: References, start: int) -> References:
        """Release all content but what is needed to resume at the end of the range, which begins at `start`.

        Returns the remaining references.
        """
        ...

    def can_trim(self, references: References, start: int) -> bool:
        """Whether `trim` would release anything."""
        ...

    def slice(self, references: References, start: int, stop: int) -> References:
        """The references of tokens [start, stop) of a range; the reference counts are divided, not increased."""
        ...

    def concat(self, first: References, second: References) -> References:
        """Join the references of two adjacent ranges."""
        ...

    def resume_depth(self, ranges: Sequence[tuple[int, References]], cached_length: int, length: int) -> int:
        """The largest position up to `length` at which a slot with `cached_length` tokens could resume.

        ranges  (start, references) of adjacent ranges from position 0 on
        """
        ...

    def attach(self, slot: int, references: References) -> None:
        """Append the content of a range to the slot, sharing it; the range begins at the end of the slot."""
        ...

    def freeable(self, references: References) -> int:
        """Cells that a release would free now, or bytes for a component without cells."""
        ...

    def over_budget(self) -> int:
        """By how much acquired content exceeds its budget, in the unit of `freeable`; 0 for cells."""
        ...

    def unused_by_slots(self, references: References) -> int:
        """Cells of the range that no slot uses; they are free after the last acquired reference is released."""
        ...

    def save(self, references: References) -> SavedTensors:
        """Copies of the content as CPU tensors."""
        ...

    def check_load(self, content: SavedTensors, start: int, stop: int) -> None:
        """Raise OutOfCells if the tokens [start, stop) of saved content do not fit."""
        ...

    def placeholder(self, content: SavedTensors, length: int) -> References:
        """What `load` would return for a saved range of `length` tokens, for `resume_depth` only; it owns nothing."""
        ...

    def load(self, content: SavedTensors, start: int, stop: int) -> References:
        """Copy the tokens [start, stop) of a saved range, counted from its start, to new cells.

        Raises OutOfCells, changing nothing.
        """
        ...


class CacheComponents(tuple[CacheComponent[Any], ...]):
    """All components as one: numbers become lists with one number for each component."""

    __slots__ = ()

    def resume_length(self, slot: int, length: int) -> int:
        """The largest length up to `length` at which every component can resume."""
        before = -1
        while length != before:
            before = length
            for component in self:
                length = component.resume_length(slot, length)
        return length

    def truncate(self, slot: int, length: int) -> None:
        """Release all content from `length` on."""
        for component in self:
            component.truncate(slot, length)

    def acquire(self, slot: int, start: int, stop: int) -> ComponentReferences:
        """Add references to a slot's content of [start, stop)."""
        return [component.acquire(slot, start, stop) for component in self]

    def release(self, references: ComponentReferences) -> None:
        """Drop acquired references."""
        for component, part in zip(self, references, strict=True):
            component.release(part)

    def slice(self, references: ComponentReferences, start: int, stop: int) -> ComponentReferences:
        """The references of tokens [start, stop) of a range."""
        return [component.slice(part, start, stop) for component, part in zip(self, references, strict=True)]

    def concat(self, first: ComponentReferences, second: ComponentReferences) -> ComponentReferences:
        """Join the references of two adjacent ranges."""
        parts = zip(self, first, second, strict=True)
        return [component.concat(before, after) for component, before, after in parts]

    def attach(self, slot: int, references: ComponentReferences) -> None:
        """Append the content of a range to a slot."""
        for component, part in zip(self, references, strict=True):
            component.attach(slot, part)

    def resume_depth(self, ranges: Sequence[tuple[int, ComponentReferences]], cached_length: int, length: int) -> int:
        """The largest position up to `length` at which a slot with `cached_length` tokens could resume.

        ranges  (start, references) along a path of the prefix tree
        """
        depth, before = max(cached_length, length), -1
        while depth != before:
            before = depth
            for index, component in enumerate(self):
                parts = [(start, references[index]) for start, references in ranges]
                depth = component.resume_depth(parts, cached_length, depth)
        return depth

    def trim(self, references: ComponentReferences, start: int) -> ComponentReferences:
        """Release all content but what is needed to resume at the end of a range, which begins at `start`."""
        return [component.trim(part, start) for component, part in zip(self, references, strict=True)]

    def freeable(self, references: ComponentReferences) -> list[int]:
        """Cells or bytes that a release would free now."""
        return [component.freeable(part) for component, part in zip(self, references, strict=True)]

    def frees_needed(self, references: ComponentReferences, needed: Sequence[int]) -> bool:
        """Whether a release would free anything for a component that needs cells or bytes."""
        parts = zip(self, references, needed, strict=True)
        return any(count > 0 and component.freeable(part) > 0 for component, part, count in parts)

    def has_unused_cells(self, references: ComponentReferences, needed: Sequence[int]) -> bool:
        """Whether a component that needs cells has cells in the range that no slot uses."""
        parts = zip(self, references, needed, strict=True)
        return any(count > 0 and component.unused_by_slots(part) > 0 for component, part, count in parts)

    def over_budget(self) -> list[int]:
        """By how much each component exceeds its budget."""
        return [component.over_budget() for component in self]

    def save(self, references: ComponentReferences) -> list[SavedTensors]:
        """Copies of the content as CPU tensors."""
        return [component.save(part) for component, part in zip(self, references, strict=True)]

    def placeholder(self, content: Sequence[SavedTensors], length: int) -> ComponentReferences:
        """What `load` would return for a saved range, for `resume_depth` only."""
        return [component.placeholder(part, length) for component, part in zip(self, content, strict=True)]

    def load(self, content: Sequence[SavedTensors], start: int, stop: int) -> ComponentReferences:
        """Copy the tokens [start, stop) of a saved range to new cells; `load_shortfall` must be 0."""
        loaded: ComponentReferences = []
        try:
            for component, part in zip(self, content, strict=True):
                loaded.append(component.load(part, start, stop))
        except (MemoryError, RuntimeError):
            for component, references in zip(self, loaded, strict=False):
                component.release(references)
            raise
        return loaded

    def load_shortfall(self, content: Sequence[SavedTensors], start: int, stop: int) -> list[int]:
        """Cells that must be freed before `load`."""
        parts = zip(self, content, strict=True)
        return [shortfall(partial(component.check_load, part, start, stop)) for component, part in parts]


def shortfall(check: Callable[[], None]) -> int:
    """Missing cells of a check that raises OutOfCells; 0 if it passes."""
    try:
        check()
    except OutOfCells as error:
        return error.needed - error.free
    return 0
