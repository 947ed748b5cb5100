"""A drafter without a model: what followed the last times that the text said this.

It looks through the client's prediction, the prompt and the output of each sequence, and through a library of what
finished requests said. The longest match of the text's end proposes its most frequent continuation, the longer the
match the more of it (SuffixDecoding, arXiv 2411.04975; algorithms 3.5). Who is not asked costs nothing (passage.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.draft.library import Library
from engine.draft.passage import LONGEST, SEPARATOR, SHORTEST, Passage, Tokens
from engine.schedule.draft import Want

# A proposal has at most so many tokens for each token of the match, and ends where it is less likely than this.
_REACH, _FLOOR = 2.0, 0.1


class LookupDrafter:
    """Proposes repetitions; implements Drafter."""

    kind = "lookup"

    def __init__(self, library: Library) -> None:
        self._library = library
        self._texts: dict[str, _Text] = {}

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        """For each want the likeliest repetition."""
        return [self._propose(want) for want in wants]

    def forget(self, sequence_id: str, said: Sequence[int]) -> None:
        """The sequence is over: what it said can serve others of its salt, if it was ever asked for."""
        if text := self._texts.pop(sequence_id, None):
            self._library.remember(text.salt, said)

    def rest(self, budget_bytes: int) -> bool:
        """Nothing outlives the process."""
        return False

    def _propose(self, want: Want) -> list[int]:
        text = self._texts.get(want.sequence_id)
        if text is None:
            text = self._texts[want.sequence_id] = _Text(want)
        source, shelf = text.passage, None
        end = text.read(want)
        best = source.find(end, source.size - 1)
        for other in self._library.shelves(want.salt):
            match = other.passage.find(end, other.passage.size)
            if match.length > best.length:
                source, best, shelf = other.passage, match, other
        if best.length < SHORTEST:
            return []
        if shelf is not None:
            self._library.want(want.salt, shelf, best.places[0])
        return source.continuation(best.places, min(want.limit, int(_REACH * best.length)), _FLOOR)


class _Text:
    """What was read of one sequence: the prediction, and behind it the prompt and the output."""

    def __init__(self, want: Want) -> None:
        self.salt = want.salt
        self.passage = Passage(_lesson(want))
        self._begin = self.passage.size
        self._position = want.draw.position - len(want.tokens)

    def read(self, want: Want) -> Tokens:
        """Take what the text has become; its end."""
        new = want.draw.position - self._position
        self.passage.read(want.tokens[-new:] if new else ())
        self._position = want.draw.position
        return self.passage.part(max(self._begin, self.passage.size - LONGEST), self.passage.size)


def _lesson(want: Want) -> list[int]:
    """What stands before the text: a prediction, behind the prompt's end, so that this brings it to mind."""
    if not want.prediction:
        return []
    end = len(want.tokens) - want.said
    return [*want.tokens[max(0, end - LONGEST) : end], *want.prediction, SEPARATOR]
