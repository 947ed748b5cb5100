"""Outputs of finished requests, for others to repeat: bounded in tokens, apart by salt, the least wanted first out.

There are two generations. Outputs enter the young one; when it holds half of what is allowed, the old one goes and the
young one takes its place. What somebody repeats from the old generation enters the young one again, so that what is
wanted stays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from engine.draft.passage import SEPARATOR, Passage


class Shelf:
    """The outputs of one salt in one generation, one behind the other, each ended by a separator."""

    def __init__(self) -> None:
        self.passage = Passage()
        self._starts: list[int] = []
        self._taken: set[int] = set()

    def add(self, tokens: Sequence[int]) -> None:
        """Put an output on the shelf."""
        self._starts.append(self.passage.size)
        self.passage.read([*tokens, SEPARATOR])

    def take(self, place: int) -> list[int]:
        """The output that has this place in the passage; none if it was taken before."""
        number = bisect_right(self._starts, place) - 1
        if number in self._taken:
            return []
        self._taken.add(number)
        stop = self._starts[number + 1] if number + 1 < len(self._starts) else self.passage.size
        tokens: list[int] = self.passage.part(self._starts[number], stop - 1).tolist()
        return tokens


class Library:
    """What was said by finished requests. `capacity` bounds the tokens of all salts together, a separator each too."""

    def __init__(self, capacity: int) -> None:
        self._room = capacity // 2
        self._young: dict[bytes, Shelf] = {}
        self._old: dict[bytes, Shelf] = {}
        self._filled = 0

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return sum(shelf.passage.size for part in (self._young, self._old) for shelf in part.values())

    def shelves(self, salt: bytes) -> list[Shelf]:
        """Where outputs of a salt stand, newest first."""
        return [part[salt] for part in (self._young, self._old) if salt in part]

    def remember(self, salt: bytes, tokens: Sequence[int]) -> None:
        """Take an output in; of one too long for a generation, its end."""
        tokens = tokens[-(self._room - 1) :] if self._room > 1 else ()
        if not tokens:
            return
        if self._filled + len(tokens) + 1 > self._room:
            self._old, self._young, self._filled = self._young, {}, 0
        self._young.setdefault(salt, Shelf()).add(tokens)
        self._filled += len(tokens) + 1

    def want(self, salt: bytes, shelf: Shelf, place: int) -> None:
        """Somebody repeats what stands at a place of a shelf: that output is kept a generation longer."""
        if self._old.get(salt) is shelf:
            self.remember(salt, shelf.take(place))
