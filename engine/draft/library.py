"""Outputs of finished requests, for others to repeat: bounded in tokens, apart by salt, the least wanted first out.

Nothing can be taken out of an automaton, so there are two generations of them. Outputs enter the young one; when it
holds half of what is allowed, the old one goes and the young one takes its place. What somebody repeats from the old
generation enters the young one again, so that what is wanted stays.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence

from engine.draft.automaton import SEPARATOR, SuffixAutomaton


class Shelf:
    """The outputs of one salt in one generation, one behind the other, each ended by a separator."""

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self._tokens = array("i")
        self._starts: list[int] = []
        self._taken: set[int] = set()

    def add(self, tokens: Sequence[int]) -> None:
        """Put an output on the shelf."""
        self._starts.append(len(self._tokens))
        self._tokens.extend([*tokens, SEPARATOR])
        self.automaton.read([*tokens, SEPARATOR])

    def take(self, state: int) -> list[int]:
        """The output in which a state of the automaton occurred last; none if it was taken before."""
        number = bisect_right(self._starts, self.automaton.latest(state)) - 1
        if number in self._taken:
            return []
        self._taken.add(number)
        stop = self._starts[number + 1] if number + 1 < len(self._starts) else len(self._tokens)
        return self._tokens[self._starts[number] : stop - 1].tolist()


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
        return sum(shelf.automaton.size for part in (self._young, self._old) for shelf in part.values())

    def shelves(self, salt: bytes) -> list[Shelf]:
        """Where outputs of a salt stand, newest first. A shelf is the same object for as long as it is in use."""
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

    def want(self, salt: bytes, shelf: Shelf, state: int) -> None:
        """Somebody repeats what a state stands for: the output that said it last is kept a generation longer."""
        if self._old.get(salt) is shelf:
            self.remember(salt, shelf.take(state))
