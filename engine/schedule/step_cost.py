"""Step cost: seconds by batch tokens and attention, measured from the steps before.

    seconds = slowdown x (table(batch tokens) + cell seconds x cells + pair seconds x pairs)

There are tables of steps with prefill tokens, of steps with draft tokens, which are verified too, and of other steps.
Between measured batch sizes seconds are linear. The slowdown of the machine is common to all sizes, so that a size does
not seem faster for not being measured lately. Beyond the measured sizes estimates are low, so that larger ones are
tried; so are steps with fewer draft tokens than were measured, which are estimated like steps without.

Measurements are collected until an estimate is computed, which takes less time a step. Of equal steps in a row the
second fastest of four counts: a step can wait for the machine, but none is too fast.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log2
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.spec import Span

Floats = NDArray[np.float64]

# Weight of a new measurement in the averages of its batch size, and the largest factor by which it changes them.
_WEIGHT, _MOST_CHANGE = 0.2, 1.25
# Measurements of a batch size after which its changes are attributed to the machine.
_MEASURED = 16
# Steps after which a batch size counts as measured twice only, so that a contradiction changes it at once.
_STALE = 100
# Share of the measured variance of cells and pairs that still counts one step later, and the variance relative to the
# square of their number below which their costs are not trusted.
_MEMORY, _DOUBT = 0.995, 0.01
# Maximum number of collected measurements, and equal ones in a row that count as one.
_COLLECTED, _GROUP = 32, 4


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes: batch tokens, the cells that its sequences attend to, and pairs of a token and a cell.

    logit_tokens  maximum batch tokens with logits: one a sequence, and all draft tokens
    draft_tokens  batch tokens that are drafts
    """

    batch_tokens: int = 0
    cells: int = 0
    pairs: int = 0
    logit_tokens: int = 0
    draft_tokens: int = 0

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Work:
        """The work of spans."""
        batch_tokens = cells = pairs = logit_tokens = 0
        for span in spans:
            length, start = span.length, span.start
            batch_tokens += length
            cells += start + length
            pairs += length * start + length * (length + 1) // 2
            logit_tokens += 1
        return cls(batch_tokens, cells, pairs, logit_tokens)

    @property
    def has_prefill(self) -> bool:
        """Whether there are prefill tokens."""
        return self.batch_tokens > self.logit_tokens

    def __add__(self, other: Work) -> Work:
        return Work(
            self.batch_tokens + other.batch_tokens,
            self.cells + other.cells,
            self.pairs + other.pairs,
            self.logit_tokens + other.logit_tokens,
            self.draft_tokens + other.draft_tokens,
        )

    def scaled(self, batch_tokens: int) -> Work:
        """The same sequences and cells with drafts, so that there are this many batch tokens."""
        drafts = batch_tokens - self.batch_tokens
        return Work(
            batch_tokens,
            self.cells,
            self.pairs * batch_tokens // max(self.batch_tokens, 1),
            self.logit_tokens + drafts,
            self.draft_tokens + drafts,
        )


class _Measurement(NamedTuple):
    """A step: its work without drafts, its batch tokens with drafts, its seconds."""

    work: Work
    batch_tokens: int
    seconds: float

    @property
    def alike(self) -> tuple[int, int, int, bool]:
        """Equal for steps that are measured together."""
        return self.batch_tokens, self.work.batch_tokens, self.work.cells.bit_length(), self.work.has_prefill


@dataclass(slots=True)
class _Attention:
    """Seconds a cell and a pair: least squares over the deviations of steps from the averages of their batch size.

    Sums are relative to the seconds of the batch size, so that short steps count as much as long ones.
    """

    cell: float = 0.0
    pair: float = 0.0
    _cells: float = 0.0
    _pairs: float = 0.0
    _both: float = 0.0
    _cells_seconds: float = 0.0
    _pairs_seconds: float = 0.0

    def seconds(self, cells: float, pairs: float) -> float:
        """Seconds of attention over cells and pairs."""
        return self.cell * cells + self.pair * pairs

    def observe(self, size: _Size, work: Work, seconds: float) -> None:
        """Learn from a step."""
        cells, pairs = (work.cells - size.cells) / size.seconds, (work.pairs - size.pairs) / size.seconds
        error = seconds / size.seconds - 1
        self._cells = _MEMORY * self._cells + cells**2 + _DOUBT * (work.cells / size.seconds) ** 2
        self._pairs = _MEMORY * self._pairs + pairs**2 + _DOUBT * (work.pairs / size.seconds) ** 2
        self._both = _MEMORY * self._both + cells * pairs
        self._cells_seconds = _MEMORY * self._cells_seconds + cells * error
        self._pairs_seconds = _MEMORY * self._pairs_seconds + pairs * error
        determinant = self._cells * self._pairs - self._both**2
        if determinant <= 0:
            return
        self.cell = (self._cells_seconds * self._pairs - self._pairs_seconds * self._both) / determinant
        self.pair = (self._pairs_seconds * self._cells - self._cells_seconds * self._both) / determinant
        if self.cell < 0:
            self.cell, self.pair = 0.0, max(self._pairs_seconds / self._pairs, 0.0)
        elif self.pair < 0:
            self.cell, self.pair = max(self._cells_seconds / self._cells, 0.0), 0.0


@dataclass(slots=True)
class _Size:
    """Steps with about as many batch tokens: averages of their work and seconds, their number, the latest step."""

    tokens: float
    cells: float
    pairs: float
    seconds: float
    count: int
    step: int

    def base(self, attention: _Attention) -> float:
        """Seconds without attention; a twentieth of all at least."""
        return max(self.seconds - attention.seconds(self.cells, self.pairs), self.seconds / 20)

    def observe(self, work: Work, seconds: float, count: int, step: int) -> None:
        """Average `count` steps."""
        self.count, self.step = self.count + count, step
        weight = max(1 - (1 - _WEIGHT) ** count, count / self.count)
        # Of the first two measurements the faster one counts: the first may have set something up.
        self.seconds = (
            min(self.seconds, seconds) if self.count == 2 else self.seconds + weight * (seconds - self.seconds)
        )
        self.tokens += weight * (work.batch_tokens - self.tokens)
        self.cells += weight * (work.cells - self.cells)
        self.pairs += weight * (work.pairs - self.pairs)


class _Table:
    """Measured batch sizes, and the lines between them."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        # By their tokens.
        self.ordered: list[_Size] = []

    @property
    def reach(self) -> int:
        """Batch tokens up to which estimates are useful: twice the most that were measured."""
        return int(2 * self.ordered[-1].tokens) if self.ordered else 0

    def size(self, tokens: int) -> _Size | None:
        """The measured size for a number of batch tokens: exact up to 22, then within 4 %."""
        return self._sizes.get(round(16 * log2(tokens)))

    def add(self, size: _Size) -> None:
        """A new size, with at most the seconds of the next smaller one in proportion to its tokens."""
        index = bisect_left(self.ordered, size.tokens, key=_tokens)
        if index:
            smaller = self.ordered[index - 1]
            size.seconds = min(size.seconds, smaller.seconds * size.tokens / smaller.tokens)
        self._sizes[round(16 * log2(size.tokens))] = size
        self.ordered.insert(index, size)


class StepCost:
    """Step costs of one model. `expect` sets the work of the current step, which `seconds` and `observe` refer to."""

    def __init__(self) -> None:
        self._prefill, self._drafted, self._decode = _Table(), _Table(), _Table()
        self._attention = _Attention()
        self._slowdown, self._steps = 1.0, 0
        # The size that changes of the machine are measured by, as long as it is the most common one.
        self._usual: _Size | None = None
        self._work = Work()
        self._collected: list[_Measurement] = []

    @property
    def work(self) -> Work:
        """The work of the current step without drafts."""
        return self._work

    @property
    def frontier(self) -> int:
        """Batch tokens with prefill up to which estimates are useful."""
        self._learn()
        return (self._prefill if self._prefill.ordered else self._decode).reach

    @property
    def reach(self) -> int:
        """Batch tokens of the current step, with drafts, up to which estimates are useful."""
        self._learn()
        drafted = self._work.scaled(self._work.batch_tokens + 1)
        return max(self._table(self._work).reach, self._table(drafted).reach)

    def expect(self, work: Work) -> None:
        """Set the work of the current step."""
        self._work = work

    def observe(self, batch_tokens: int, seconds: float) -> None:
        """Measure the current step."""
        if batch_tokens < 1 or seconds <= 0:
            return
        self._collected.append(_Measurement(self._work, batch_tokens, seconds))
        if len(self._collected) == _COLLECTED:
            self._learn()

    def seconds(self, batch_tokens: Sequence[int]) -> list[float]:
        """Estimates for the current step with other numbers of batch tokens."""
        self._learn()
        plain, drafted = self._lines(self._work), self._lines(self._work.scaled(self._work.batch_tokens + 1))
        works = map(self._work.scaled, batch_tokens)
        return [self._between(drafted if work.draft_tokens else plain, work) for work in works]

    def estimate(self, work: Work) -> float:
        """The estimate for any work."""
        self._learn()
        return self._between(self._lines(work), work)

    def token_seconds(self, max_tokens: int) -> float:
        """Estimated seconds of a prefill token without attention, in the most efficient step of up to `max_tokens`."""
        self._learn()
        sizes = np.arange(1, max_tokens + 1)
        return self._slowdown * float(np.min(np.interp(sizes, *self._lines(Work(1))) / sizes))

    def grown(self, work: Work, start: int, max_tokens: int) -> Floats:
        """Estimates for work with 1 to `max_tokens` prefill tokens more, from position `start` of a sequence on."""
        self._learn()
        more = np.arange(1, max_tokens + 1)
        pairs = work.pairs + more * start + more * (more + 1) // 2
        attention = self._attention.cell * (work.cells + start + more) + self._attention.pair * pairs
        tokens, seconds = self._lines(Work(1))
        estimates: Floats = self._slowdown * (np.interp(work.batch_tokens + more, tokens, seconds) + attention)
        return estimates

    def measured(self, batch_tokens: int) -> int:
        """Measurements of batch sizes within a third of this one, in steps like the current one without drafts."""
        self._learn()
        return sum(
            size.count for size in self._table(self._work).ordered if 2 / 3 <= size.tokens / batch_tokens <= 3 / 2
        )

    def age(self, batch_tokens: int) -> int:
        """Steps since this batch size was measured, in steps like the current one with drafts up to it."""
        self._learn()
        size = self._table(self._work.scaled(batch_tokens)).size(batch_tokens)
        return self._steps - (size.step if size else 0)

    def _learn(self) -> None:
        collected, self._collected = self._collected, []
        for _, group in groupby(collected, lambda measurement: measurement.alike):
            steps = list(group)
            for start in range(0, len(steps), _GROUP):
                self._update(sorted(steps[start : start + _GROUP], key=lambda measurement: measurement.seconds))

    def _update(self, alike: Sequence[_Measurement]) -> None:
        """Update the averages by steps that are alike, fastest first."""
        count = len(alike)
        self._steps += count
        work, batch_tokens, seconds = alike[count // 4]
        work, seconds = work.scaled(batch_tokens), seconds / self._slowdown
        table = self._table(work)
        size = table.size(work.batch_tokens)
        if size is None:
            return table.add(_Size(work.batch_tokens, work.cells, work.pairs, seconds, count, self._steps))
        if size.step + _STALE < self._steps:
            size.count = min(size.count, 2)
        if size.count >= 2:
            expected = size.base(self._attention) + self._attention.seconds(work.cells, work.pairs)
            self._attention.observe(size, work, min(max(seconds, expected / 2), 2 * expected))
            seconds = min(max(seconds, expected / _MOST_CHANGE), _MOST_CHANGE * expected)
        if size.count >= _MEASURED and (self._usual is None or self._usual.step + _STALE < self._steps):
            self._usual = size
        if size is self._usual:
            self._slowdown *= (seconds / expected) ** (1 - (1 - _WEIGHT) ** count)
            size.step = self._steps
        else:
            size.observe(work, seconds, count, self._steps)
        return None

    def _table(self, work: Work) -> _Table:
        return self._prefill if work.has_prefill else self._drafted if work.draft_tokens else self._decode

    def _between(self, lines: tuple[list[float], list[float]], work: Work) -> float:
        return self._slowdown * (_between(*lines, work.batch_tokens) + self._attention.seconds(work.cells, work.pairs))

    def _lines(self, work: Work) -> tuple[list[float], list[float]]:
        """Tokens and base seconds of measured sizes, from (0, 0) on.

        Below the smallest size measured with drafts, sizes without are used. Another table replaces an empty one.
        """
        first, second = (self._prefill, self._decode) if work.has_prefill else (self._decode, self._prefill)
        sizes = first.ordered or second.ordered
        if drafted := self._table(work).ordered if work.draft_tokens else []:
            sizes = [*(size for size in sizes if size.tokens < drafted[0].tokens), *drafted]
        return [0.0, *map(_tokens, sizes)], [0.0, *(size.base(self._attention) for size in sizes)]


def _tokens(size: _Size) -> float:
    return size.tokens


def _between(tokens: Sequence[float], seconds: Sequence[float], target: int) -> float:
    """Linear interpolation; constant outside."""
    index = bisect_left(tokens, target)
    if index == len(tokens):
        return seconds[-1]
    if index == 0:
        return seconds[0]
    share = (target - tokens[index - 1]) / (tokens[index] - tokens[index - 1])
    return seconds[index - 1] + share * (seconds[index] - seconds[index - 1])
