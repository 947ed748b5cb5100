"""A drafter without a model: what followed the last time that the text said this.

Each sequence has a suffix automaton of its own over the client's prediction, its prompt and its output; behind it is a
library of what finished requests said. The longest match of the text's end proposes its most frequent continuation,
the longer the match the more of it (SuffixDecoding, arXiv 2411.04975; algorithms 3.5). Only what was emitted is read,
so there is nothing to take back when a draft is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.draft.automaton import SEPARATOR, Match, SuffixAutomaton
from engine.draft.drafter import Want
from engine.draft.library import Library, Shelf

# A proposal has at most so many tokens for each token of the match, and ends where it is less likely than this.
_REACH, _FLOOR = 2.0, 0.1
# A single token that was seen before says nothing.
_SHORTEST = 2
# Tokens that one sequence reads in one call at most (about 20 ms): a long prompt is caught up with over several steps.
_CATCH_UP = 4096
# Tokens of the text's end that are looked up on a new shelf.
_TAIL = 32


class LookupDrafter:
    """Proposes repetitions; implements Drafter."""

    kind = "lookup"

    def __init__(self, library: Library) -> None:
        self._library = library
        self._readers: dict[str, _Reader] = {}
        self._outputs: dict[str, list[int]] = {}

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        """For each want the likeliest repetition; nothing while a long prompt is still being read."""
        return [self._propose(want) for want in wants]

    def observe(self, sequence_id: str, tokens: Sequence[int]) -> None:
        """Take note of emitted tokens."""
        self._outputs.setdefault(sequence_id, []).extend(tokens)
        if reader := self._readers.get(sequence_id):
            reader.unread.extend(tokens)

    def forget(self, sequence_id: str) -> None:
        """The sequence is over: what it said can serve others of its salt, if it was ever asked for."""
        output = self._outputs.pop(sequence_id, [])
        if reader := self._readers.pop(sequence_id, None):
            self._library.remember(reader.salt, output)

    def rest(self, budget_bytes: int) -> bool:
        """Nothing outlives the process."""
        return False

    def _propose(self, want: Want) -> list[int]:
        reader = self._readers.get(want.sequence_id)
        if reader is None:
            said = len(self._outputs.get(want.sequence_id, ()))
            reader = self._readers[want.sequence_id] = _Reader(want.salt, _lesson(want, said))
        if not reader.catch_up():
            return []
        best = reader.own.repeated()
        source, shelf = reader.own, None
        for place in reader.places(self._library.shelves(want.salt)):
            if place.match.length > best.length:
                source, best, shelf = place.shelf.automaton, place.match, place.shelf
        if best.length < _SHORTEST:
            return []
        if shelf is not None:
            self._library.want(want.salt, shelf, best.state)
        return source.continuation(best.state, min(want.limit, int(_REACH * best.length)), _FLOOR)


def _lesson(want: Want, said: int) -> list[int]:
    """What a reader starts with: the text so far, of which `said` tokens are output.

    A prediction comes first, behind a copy of the prompt's end: so the end of the prompt itself brings it to mind.
    """
    tokens = list(want.tokens)
    if not want.prediction:
        return tokens
    end = len(tokens) - said
    return [*tokens[max(0, end - _TAIL) : end], *want.prediction, SEPARATOR, *tokens]


class _Reader:
    """How far one sequence was read. `unread` are tokens of its text that the automaton has still to read."""

    def __init__(self, salt: bytes, text: Sequence[int]) -> None:
        self.salt = salt
        self.own = SuffixAutomaton()
        self.unread = deque(text)
        self._tail: deque[int] = deque(maxlen=_TAIL)
        self._places: list[_Place] = []

    def catch_up(self) -> bool:
        """Read on; whether nothing is left to read."""
        for _ in range(min(_CATCH_UP, len(self.unread))):
            token = self.unread.popleft()
            self.own.extend(token)
            self._tail.append(token)
            for place in self._places:
                place.follow(token)
        return not self.unread

    def places(self, shelves: Sequence[Shelf]) -> list[_Place]:
        """Where the end of the text is found on each shelf."""
        if [place.shelf for place in self._places] != list(shelves):
            known = {id(place.shelf): place for place in self._places}
            self._places = [known.get(id(shelf)) or _Place(shelf, self._tail) for shelf in shelves]
        return self._places


class _Place:
    """The longest match of a text's end on a shelf."""

    def __init__(self, shelf: Shelf, tail: Sequence[int]) -> None:
        self.shelf = shelf
        self.match = Match()
        for token in tail:
            self.follow(token)

    def follow(self, token: int) -> None:
        """The text goes on."""
        self.match = self.shelf.automaton.follow(self.match, token)
