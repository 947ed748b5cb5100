"""What drafting costs, learnt from what it took: a start, so much for each level, and what texts take to be read."""

from __future__ import annotations

from math import log2

# What is kept of earlier measurements at each new one, and how far one may pull: it can wait for the machine.
_KEPT, _CLAMP = 0.97, 0.25
# A spread of levels below this share of their mean says little of what one level costs: then there is no start.
_SPREAD = 0.1
# Sizes are alike whose halvings differ by less than one part in so many.
_LIKE = 3


class LevelCost:
    """A straight line through (levels, seconds), by least squares over measurements that fade."""

    def __init__(self) -> None:
        self._count = self._levels = self._seconds = 0.0
        self._squares = self._products = 0.0
        self._start = self._level = 0.0

    def observe(self, levels: int, seconds: float) -> None:
        """Drafting so many levels took so long."""
        if levels < 1 or seconds <= 0:
            return
        if self._count:
            expected = self._start + self._level * levels
            seconds = min(max(seconds, (1 - _CLAMP) * expected), (1 + _CLAMP) * expected)
        self._count = _KEPT * self._count + 1
        self._levels = _KEPT * self._levels + levels
        self._seconds = _KEPT * self._seconds + seconds
        self._squares = _KEPT * self._squares + levels * levels
        self._products = _KEPT * self._products + levels * seconds
        self._draw()

    def line(self) -> tuple[float, float]:
        """Seconds of the start, and of each level."""
        return self._start, self._level

    def _draw(self) -> None:
        """The line. The less the levels differ, the more it goes through nothing for no levels."""
        levels, seconds = self._levels / self._count, self._seconds / self._count
        spread, doubt = self._squares / self._count - levels**2, (_SPREAD * levels) ** 2
        steepest = seconds / levels
        level = (self._products / self._count - levels * seconds + doubt * steepest) / (spread + doubt)
        self._level = min(max(level, 0.0), steepest)
        self._start = seconds - self._level * levels


class DraftCost:
    """Such lines by how many sequences are drafted for at once, and seconds for each token of a text to be read."""

    def __init__(self) -> None:
        self._lines: dict[int, LevelCost] = {}
        self._read = self._reading = 0.0

    def observe(self, sequences: int, levels: int, seconds: float) -> None:
        """Drafting so many levels for so many sequences took so long."""
        self._lines.setdefault(size(sequences), LevelCost()).observe(levels, seconds)

    @property
    def token(self) -> float:
        """Seconds to read a token of a text that was not followed; 0 as long as none was read."""
        return self._reading / self._read if self._read else 0.0

    def read(self, tokens: int, seconds: float) -> None:
        """Reading took so long; texts that are read to their end now had so many tokens more than was read of them."""
        self._read = _KEPT * self._read + tokens
        self._reading = _KEPT * self._reading + seconds

    def line(self, sequences: int) -> tuple[float, float]:
        """Seconds of the start, and of each level: of about as many sequences, as far as such are known.

        Else of the nearest number of them. Fewer than that are thought to cost in proportion, more to cost no more.
        """
        wanted = size(sequences)
        nearest = min(self._lines, key=lambda known: abs(known - wanted), default=None)
        if nearest is None:
            return 0.0, 0.0
        start, level = self._lines[nearest].line()
        share = min(2 ** ((wanted - nearest) / _LIKE), 1.0)
        return share * start, share * level


def size(sequences: int) -> int:
    """The same for numbers that are alike: halvings, in three parts."""
    return round(_LIKE * log2(sequences))
