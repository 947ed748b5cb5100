"""All components as one: what the prefix tree holds of a stretch is a list with each component's share of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from kvcache.component import Component, Content
from kvcache.errors import OutOfCells
from kvcache.node import Holdings


class Components:
    """The verbs of kvcache/component.py for all of them at once; a number becomes a list with one for each."""

    def __init__(self, components: Sequence[Component[Any]]) -> None:
        self._components = tuple(components)

    def __iter__(self) -> Iterator[Component[Any]]:
        """One after the other."""
        return iter(self._components)

    def hold(self, slot: int, start: int, stop: int) -> Holdings:
        """Reference what a slot has for [start, stop)."""
        return [component.hold(slot, start, stop) for component in self._components]

    def release(self, held: Holdings) -> None:
        """Drop the references of `hold`."""
        for component, part in zip(self._components, held, strict=True):
            component.release(part)

    def part(self, held: Holdings, start: int, stop: int) -> Holdings:
        """The share of a stretch's tokens [start, stop)."""
        return [component.part(part, start, stop) for component, part in zip(self._components, held, strict=True)]

    def joined(self, first: Holdings, second: Holdings) -> Holdings:
        """Two stretches that follow each other as one."""
        both = zip(self._components, first, second, strict=True)
        return [component.joined(old, new) for component, old, new in both]

    def restore(self, slot: int, held: Holdings) -> None:
        """Append a stretch to a slot."""
        for component, part in zip(self._components, held, strict=True):
            component.restore(slot, part)

    def stands(self, slot: int, length: int) -> bool:
        """Whether the slot's content could go on at `length`."""
        return all(component.standing(slot, length) == length for component in self._components)

    def reach(self, stretches: Sequence[tuple[int, Holdings]], standing: int, depth: int) -> int:
        """The deepest position up to `depth` where all could go on: each may lower it, until none does.

        stretches  what is held of a path from its start on, each with the position where it begins
        """
        goal, before = max(standing, depth), -1
        while goal != before:
            before = goal
            for at, component in enumerate(self._components):
                goal = component.reach([(start, held[at]) for start, held in stretches], standing, goal)
        return goal

    def thin(self, held: Holdings, start: int) -> Holdings:
        """Release all but what it takes to go on at the end of a stretch, which begins at `start`; what stays."""
        return [component.thin(part, start) for component, part in zip(self._components, held, strict=True)]

    def freeable(self, held: Holdings) -> list[int]:
        """What would come free if a stretch were released."""
        return [component.freeable(part) for component, part in zip(self._components, held, strict=True)]

    def helps(self, held: Holdings, need: Sequence[int]) -> bool:
        """Whether a component that needs something would get it if a stretch were released."""
        parts = zip(self._components, held, need, strict=True)
        return any(count > 0 and component.freeable(part) > 0 for component, part, count in parts)

    def idles(self, held: Holdings, need: Sequence[int]) -> bool:
        """Whether a stretch holds cells of a component that needs some, and no slot uses them."""
        parts = zip(self._components, held, need, strict=True)
        return any(count > 0 and component.idle(part) > 0 for component, part, count in parts)

    def surplus(self) -> list[int]:
        """By how much each holds more than it may."""
        return [component.surplus() for component in self._components]

    def save(self, held: Holdings) -> list[Content]:
        """A stretch's content in host memory."""
        return [component.save(part) for component, part in zip(self._components, held, strict=True)]

    def outline(self, content: Sequence[Content], length: int) -> Holdings:
        """What `load` would give of a whole stretch, as far as `reach` sees it."""
        return [component.outline(part, length) for component, part in zip(self._components, content, strict=True)]

    def load(self, content: Sequence[Content], start: int, stop: int) -> Holdings:
        """The tokens [start, stop) of a saved stretch in fresh cells, which are there: nothing is `lacking`."""
        return [component.load(part, start, stop) for component, part in zip(self._components, content, strict=True)]

    def lacking(self, content: Sequence[Content], start: int, stop: int) -> list[int]:
        """What has to come free before `load` may be called."""
        parts = zip(self._components, content, strict=True)
        return [lacking(partial(component.check_load, part, start, stop)) for component, part in parts]


def lacking(check: Callable[[], None]) -> int:
    """By how many cells a check falls short that raises OutOfCells; 0: it passes."""
    try:
        check()
    except OutOfCells as error:
        return error.needed - error.free
    return 0
