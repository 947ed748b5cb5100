"""What a step computes, in numbers: what it costs is said of these (cost.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcache.spec import Span


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes: rows, the cells that its sequences look at, and the pairs of a row and a cell it sees.

    Layers that see less than all are not told apart: the slopes are those of the layers together.

    told  rows behind which a token is told, at most: one of each span, and all that are added to a step
    """

    rows: int = 0
    cells: int = 0
    pairs: int = 0
    told: int = 0

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Work:
        """The work of some spans."""
        rows = cells = pairs = told = 0
        for span in spans:
            length, start = span.length, span.start
            rows += length
            cells += start + length
            pairs += length * start + length * (length + 1) // 2
            told += 1
        return cls(rows, cells, pairs, told)

    @property
    def reads(self) -> bool:
        """Whether some of it is a prompt."""
        return self.rows > self.told

    def __add__(self, other: Work) -> Work:
        return Work(self.rows + other.rows, self.cells + other.cells, self.pairs + other.pairs, self.told + other.told)

    def scaled(self, rows: int) -> Work:
        """The same sequences with other rows, which look as far as these do."""
        return Work(rows, self.cells, self.pairs * rows // max(self.rows, 1), self.told + rows - self.rows)
