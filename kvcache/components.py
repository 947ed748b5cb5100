"""All components as one: what the prefix tree holds of a stretch is a list with each component's share of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvcache.component import CacheComponent, SavedTensors
from kvcache.errors import OutOfCells
from kvcache.node import ComponentReferences


class CacheComponents(tuple[CacheComponent[Any], ...]):
    """The verbs of kvcache/component.py for all of them at once; a number becomes a list with one for each."""

    __slots__ = ()

    def resume_length(self, slot: int, length: int) -> int:
        """The deepest length, at most the one asked for, where all could go on: each may lower it, until none does."""
        before = -1
        while length != before:
            before = length
            for component in self:
                length = component.resume_length(slot, length)
        return length

    def truncate(self, slot: int, length: int) -> None:
        """Forget everything from `length` on."""
        for component in self:
            component.truncate(slot, length)

    def acquire(self, slot: int, start: int, stop: int) -> ComponentReferences:
        """Reference what a slot has for [start, stop)."""
        return [component.acquire(slot, start, stop) for component in self]

    def release(self, references: ComponentReferences) -> None:
        """Drop the references of `acquire`."""
        for component, part in zip(self, references, strict=True):
            component.release(part)

    def slice(self, references: ComponentReferences, start: int, stop: int) -> ComponentReferences:
        """The share of a stretch's tokens [start, stop)."""
        return [component.slice(part, start, stop) for component, part in zip(self, references, strict=True)]

    def concat(self, first: ComponentReferences, second: ComponentReferences) -> ComponentReferences:
        """Two stretches that follow each other as one."""
        both = zip(self, first, second, strict=True)
        return [component.concat(old, new) for component, old, new in both]

    def attach(self, slot: int, references: ComponentReferences) -> None:
        """Append a stretch to a slot."""
        for component, part in zip(self, references, strict=True):
            component.attach(slot, part)

    def resume_depth(self, ranges: Sequence[tuple[int, ComponentReferences]], cached_length: int, length: int) -> int:
        """The deepest position up to `length` from which a slot could go on that stands at `cached_length` now.

        stretches  what is held of a path from its start on, each with the position where it begins
        """
        goal, before = max(cached_length, length), -1
        while goal != before:
            before = goal
            for at, component in enumerate(self):
                goal = component.resume_depth([(start, held[at]) for start, held in ranges], cached_length, goal)
        return goal

    def trim(self, references: ComponentReferences, start: int) -> ComponentReferences:
        """Release all but what it takes to go on at the end of a stretch, which begins at `start`; what stays."""
        return [component.trim(part, start) for component, part in zip(self, references, strict=True)]

    def freeable(self, references: ComponentReferences) -> list[int]:
        """What would come free if a stretch were released."""
        return [component.freeable(part) for component, part in zip(self, references, strict=True)]

    def frees_needed(self, references: ComponentReferences, need: Sequence[int]) -> bool:
        """Whether a component that needs something would get it if a stretch were released."""
        parts = zip(self, references, need, strict=True)
        return any(count > 0 and component.freeable(part) > 0 for component, part, count in parts)

    def has_unused_cells(self, references: ComponentReferences, need: Sequence[int]) -> bool:
        """Whether a stretch holds cells of a component that needs some, and no slot uses them."""
        parts = zip(self, references, need, strict=True)
        return any(count > 0 and component.unused_by_slots(part) > 0 for component, part, count in parts)

    def over_budget(self) -> list[int]:
        """By how much each holds more than it may."""
        return [component.over_budget() for component in self]

    def save(self, references: ComponentReferences) -> list[SavedTensors]:
        """A stretch's content in host memory."""
        return [component.save(part) for component, part in zip(self, references, strict=True)]

    def placeholder(self, content: Sequence[SavedTensors], length: int) -> ComponentReferences:
        """What `load` would give of a whole stretch, as far as `deepest` sees it."""
        return [component.placeholder(part, length) for component, part in zip(self, content, strict=True)]

    def load(self, content: Sequence[SavedTensors], start: int, stop: int) -> ComponentReferences:
        """The tokens [start, stop) of a saved stretch in fresh cells, which are there: nothing is `load_shortfall`."""
        return [component.load(part, start, stop) for component, part in zip(self, content, strict=True)]

    def load_shortfall(self, content: Sequence[SavedTensors], start: int, stop: int) -> list[int]:
        """What has to come free before `load` may be called."""
        parts = zip(self, content, strict=True)
        return [shortfall(partial(component.check_load, part, start, stop)) for component, part in parts]


def shortfall(check: Callable[[], None]) -> int:
    """By how many cells a check falls short that raises OutOfCells; 0: it passes."""
    try:
        check()
    except OutOfCells as error:
        return error.needed - error.free
    return 0
