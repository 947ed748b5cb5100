"""How long texts become: what those that go on now may still say, told from those that ended."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

# Tokens that a text says, as long as nothing is known, and texts that count: the latest ones.
_GUESS, _TEXTS = 64.0, 128
# The longest of them that tell how far others go beyond them.
_LONGEST = 8


class Lengths:
    """The lengths of outputs that ended."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, tokens: int) -> None:
        """An output ended after so many tokens."""
        if len(self._latest) == _TEXTS:
            oldest = self._latest.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._latest.append(tokens)
        insort(self._sorted, tokens)

    def left(self, said: int) -> float:
        """Tokens still to come behind so many, on average of the texts that became longer.

        One more, of which nothing is known (`_beyond`), is thought to be among them: so a few texts do not say too
        much, and there is an answer behind the longest of them.
        """
        longer = self._sorted[bisect_right(self._sorted, said) :]
        return (self._beyond(said) + sum(longer) - len(longer) * said) / (1 + len(longer))

    def _beyond(self, said: int) -> float:
        """What a text says that goes on where others ended: as much as the longest differ, which have no memory then.

        One that left them all behind goes on for as long as it did since; where few are known, for as long as it is.
        """
        if len(self._sorted) < _LONGEST:
            return max(said, _GUESS)
        longest = self._sorted[-_LONGEST:]
        return max(sum(longest) / _LONGEST - longest[0], said - longest[-1], 1.0)
