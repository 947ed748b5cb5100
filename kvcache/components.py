"""All components as one: what the prefix tree holds of a stretch is a list with each component's share of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvcache.component import Component, Content
from kvcache.errors import OutOfCells
from kvcache.node import Holdings


class Components(tuple[Component[Any], ...]):
    """The verbs of kvcache/component.py for all of them at once; a number becomes a list with one for each."""

    __slots__ = ()

    def standing(self, slot: int, length: int) -> int:
        """The deepest length, at most the one asked for, where all could go on: each may lower it, until none does."""
        before = -1
        while length != before:
            before = length
            for component in self:
                length = component.standing(slot, length)
        return length

    def truncate(self, slot: int, length: int) -> None:
        """Forget everything from `length` on."""
        for component in self:
            component.truncate(slot, length)

    def hold(self, slot: int, start: int, stop: int) -> Holdings:
        """Reference what a slot has for [start, stop)."""
        return [component.hold(slot, start, stop) for component in self]

    def release(self, held: Holdings) -> None:
        """Drop the references of `hold`."""
        for component, part in zip(self, held, strict=True):
            component.release(part)

    def part(self, held: Holdings, start: int, stop: int) -> Holdings:
        """The share of a stretch's tokens [start, stop)."""
        return [component.part(part, start, stop) for component, part in zip(self, held, strict=True)]

    def joined(self, first: Holdings, second: Holdings) -> Holdings:
        """Two stretches that follow each other as one."""
        both = zip(self, first, second, strict=True)
        return [component.joined(old, new) for component, old, new in both]

    def restore(self, slot: int, held: Holdings) -> None:
        """Append a stretch to a slot."""
        for component, part in zip(self, held, strict=True):
            component.restore(slot, part)

    def deepest(self, stretches: Sequence[tuple[int, Holdings]], standing: int, length: int) -> int:
        """The deepest position up to `length` from which a slot could go on that stands at `standing` now.

        stretches  what is held of a path from its start on, each with the position where it begins
        """
        goal, before = max(standing, length), -1
        while goal != before:
            before = goal
            for at, component in enumerate(self):
                goal = component.deepest([(start, held[at]) for start, held in stretches], standing, goal)
        return goal

    def thin(self, held: Holdings, start: int) -> Holdings:
        """Release all but what it takes to go on at the end of a stretch, which begins at `start`; what stays."""
        return [component.thin(part, start) for component, part in zip(self, held, strict=True)]

    def freeable(self, held: Holdings) -> list[int]:
        """What would come free if a stretch were released."""
        return [component.freeable(part) for component, part in zip(self, held, strict=True)]

    def helps(self, held: Holdings, need: Sequence[int]) -> bool:
        """Whether a component that needs something would get it if a stretch were released."""
        parts = zip(self, held, need, strict=True)
        return any(count > 0 and component.freeable(part) > 0 for component, part, count in parts)

    def idles(self, held: Holdings, need: Sequence[int]) -> bool:
        """Whether a stretch holds cells of a component that needs some, and no slot uses them."""
        parts = zip(self, held, need, strict=True)
        return any(count > 0 and component.idle(part) > 0 for component, part, count in parts)

    def surplus(self) -> list[int]:
        """By how much each holds more than it may."""
        return [component.surplus() for component in self]

    def save(self, held: Holdings) -> list[Content]:
        """A stretch's content in host memory."""
        return [component.save(part) for component, part in zip(self, held, strict=True)]

    def outline(self, content: Sequence[Content], length: int) -> Holdings:
        """What `load` would give of a whole stretch, as far as `deepest` sees it."""
        return [component.outline(part, length) for component, part in zip(self, content, strict=True)]

    def load(self, content: Sequence[Content], start: int, stop: int) -> Holdings:
        """The tokens [start, stop) of a saved stretch in fresh cells, which are there: nothing is `lacking`."""
        return [component.load(part, start, stop) for component, part in zip(self, content, strict=True)]

    def lacking(self, content: Sequence[Content], start: int, stop: int) -> list[int]:
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
