"""What a step costs by its rows and by what they look at, learnt from the steps that were taken.

One for each model: the budget of prompts (budget.py) and the depths of drafts (draft/adaptive.py) ask the same one.
Where nothing was measured the estimate errs towards cheap: what looks cheap is tried, and trying measures it.

    seconds = pace x (curve(rows) + cell x cells + pair x pairs)

The pace is that of the machine, which other work slows down: it is learnt from the usual size for all sizes of steps,
so that those which were not taken for a while are not thought faster than they are. A curve is measured points with
straight lines between them. There are two: a row behind which a token is told has logits and a draw, so steps of such
rows alone cost more than those that read prompts. The two slopes come from how steps of about as many rows differ
(algorithms.md 3.13 with a curve in place of its straight line, for kernels work by the tile). Some ten points in plain
numbers are several times cheaper than as arrays.

What steps took is put down, and learnt from when somebody asks: among steps of a model this code is in no cache of the
processor, so it costs several times less for many steps at once. Of steps that are alike their median counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from statistics import median_low
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.schedule.work import Work

Floats = NDArray[np.float64]

# Weight of a new measurement, and how far one may pull: a step can wait for the machine, but none is done too early.
_WEIGHT, _CLAMP = 0.25, 1.25
# Where the size that is usual takes longer, nearly all of that is said of the machine, once so many steps tell what it
# takes: what is said of the size alone makes others look cheap that were not taken lately. What another size takes is
# said of it alone, by little of what is known already. If that were said of the machine too, the usual size would take
# it back, over and over.
_PACE, _OWN, _KNOWN, _FIRM = 0.15, 0.02, 16, 0.05
# The same for the slopes: where texts become longer at once, steps do.
_TWICE = 2.0
# Row counts closer than this share a point; and what is about as many.
_RESOLUTION, _ABOUT = 0.06, 0.7
# Steps that are put down at most, and of those that are alike so many are learnt from at once.
_LONGEST, _AT_ONCE = 64, 3
# So many steps without drafts behind one with drafts find the processor's caches full of what is not theirs: of a small
# model the first of them takes up to 1.8 times as long as the tenth. How much that is on average, as long as nothing is
# known, and the weight of a new measurement.
_COLD, _COLDER, _LATEST = 4, 0.1, 0.1
# Steps after which a measurement gives way to one that contradicts it, and for how many it counts at most.
_FRESH, _OLD = 100, 7
# The first steps of all find nothing where it will be: each takes up to half as long again. What was measured in them
# alone counts as one measurement, and of two the faster one is right.
_WARM = 48
# What the slopes keep of a measurement from step to step, and the variance, as a share of the square of the whole, that
# steps must show before they are believed.
_MEMORY, _DOUBT = 0.995, 0.01
# What rows cost at least of the steps they were measured in, whatever the slopes say.
_LEAST = 0.05


@dataclass(slots=True)
class _Slopes:
    """Seconds a cell and a pair: least squares over how steps differ from their like, which forget.

    Sums are over cells and pairs a second, so that short steps weigh as much as long ones.
    """

    cell: float = 0.0
    pair: float = 0.0
    _cells: float = 0.0
    _pairs: float = 0.0
    _both: float = 0.0
    _cells_seconds: float = 0.0
    _pairs_seconds: float = 0.0

    def seconds(self, cells: float, pairs: float) -> float:
        """What looking at so much costs."""
        return self.cell * cells + self.pair * pairs

    def take(self, point: _Point, work: Work, seconds: float) -> None:
        """A step that differs from those of its point."""
        scale = 1 / point.seconds
        cells, pairs = (work.cells - point.cells) * scale, (work.pairs - point.pairs) * scale
        error = seconds * scale - 1
        self._cells = _MEMORY * self._cells + cells * cells + _DOUBT * (work.cells * scale) ** 2
        self._pairs = _MEMORY * self._pairs + pairs * pairs + _DOUBT * (work.pairs * scale) ** 2
        self._both = _MEMORY * self._both + cells * pairs
        self._cells_seconds = _MEMORY * self._cells_seconds + cells * error
        self._pairs_seconds = _MEMORY * self._pairs_seconds + pairs * error
        self._solve()

    def _solve(self) -> None:
        """The slopes that explain most; neither is below zero."""
        determinant = self._cells * self._pairs - self._both**2
        if determinant <= 0:
            return
        cell = (self._cells_seconds * self._pairs - self._pairs_seconds * self._both) / determinant
        pair = (self._pairs_seconds * self._cells - self._cells_seconds * self._both) / determinant
        if cell < 0:
            cell, pair = 0.0, self._pairs_seconds / self._pairs
        elif pair < 0:
            cell, pair = self._cells_seconds / self._cells, 0.0
        self.cell, self.pair = max(cell, 0.0), max(pair, 0.0)


@dataclass(slots=True)
class _Point:
    """Steps of about so many rows: means of their work and seconds, how many there were, and when the latest was."""

    rows: float
    cells: float
    pairs: float
    seconds: float
    count: int
    step: int

    def bare(self, slopes: _Slopes) -> float:
        """Seconds without what was looked at."""
        return max(self.seconds - slopes.seconds(self.cells, self.pairs), _LEAST * self.seconds)

    def expected(self, work: Work, slopes: _Slopes) -> float:
        """Seconds of such a step that looks at what this one does."""
        return self.bare(slopes) + slopes.seconds(work.cells, work.pairs)

    def take(self, work: Work, seconds: float, step: int, count: int, weight: float) -> None:
        """The median of `count` more measurements, each of so much weight beside those before it, or an equal one."""
        self.count += count
        weight = max(1 - (1 - weight) ** count, count / self.count)
        # The first steps of a size may have to set something up: of two, the faster one is right.
        self.seconds = (
            min(self.seconds, seconds) if self.count == 2 else self.seconds * (seconds / self.seconds) ** weight
        )
        self.rows += weight * (work.rows - self.rows)
        self.cells += weight * (work.cells - self.cells)
        self.pairs += weight * (work.pairs - self.pairs)
        self.step = step


class _Curve:
    """Points by their rows, with straight lines between them."""

    def __init__(self) -> None:
        self.points: list[_Point] = []

    @property
    def frontier(self) -> int:
        """Rows up to which an estimate means something: twice the most that were measured."""
        return int(2 * self.points[-1].rows) if self.points else 0

    def near(self, rows: int) -> _Point | None:
        """The point of so many rows, if there is one."""
        place, found, least = bisect_left(self.points, rows, key=_rows), None, _RESOLUTION * rows
        for point in self.points[max(place - 1, 0) : place + 1]:
            if abs(point.rows - rows) <= least:
                found, least = point, abs(point.rows - rows)
        return found

    def add(self, point: _Point) -> None:
        """One that is near no other."""
        self.points.insert(bisect_left(self.points, point.rows, key=_rows), point)

    def draw(self, slopes: _Slopes, least: int) -> tuple[list[float], list[float]]:
        """Rows and bare seconds of the points from `least` rows on, and of the one before them.

        Less what newer points contradict: more rows cost no less, and n times the rows n times at most. Below the
        fewest measured seconds fall in proportion.
        """
        first = max(bisect_left(self.points, least, key=_rows) - 1, 0)
        points = self.points[first:]
        rows = [0.0, *(point.rows for point in points)]
        seconds = [0.0, *(point.bare(slopes) for point in points)]
        for at in range(len(points) - 1, 0, -1):
            if seconds[at] > seconds[at + 1] and _doubted(points[at - 1], points[at]):
                seconds[at] = seconds[at + 1]
        for at in range(1, len(points)):
            most_seconds = seconds[at] * rows[at + 1] / rows[at]
            if seconds[at + 1] > most_seconds and _doubted(points[at], points[at - 1]):
                seconds[at + 1] = most_seconds
        return rows, seconds


class _Step(NamedTuple):
    """A step that was taken: its work without drafts, its rows with them."""

    work: Work
    rows: int
    seconds: float

    @property
    def like(self) -> tuple[int, int, int, bool]:
        """The same for steps that are alike."""
        return self.rows, self.work.rows, self.work.cells.bit_length(), self.work.reads


class StepCost:
    """Seconds a step by its work. It knows the step at hand (`expect`), for which `seconds` and `observe` are."""

    def __init__(self) -> None:
        self._reading, self._telling = _Curve(), _Curve()
        self._slopes = _Slopes()
        self._steps = 0
        self._expected = Work()
        self._pace = 1.0
        # A size that is known and was taken lately, the same one for as long as it is.
        self._usual: _Point | None = None
        self._taken: list[_Step] = []
        # Steps without drafts since one with drafts, and what the first of them take longer, as a share.
        self._plain, self._colder = _COLD, _COLDER

    @property
    def pace(self) -> float:
        """How slow the machine is now, for whatever else it computes."""
        self._learn()
        return self._pace

    @property
    def frontier(self) -> int:
        """Rows of a step with prompts up to which an estimate means something."""
        self._learn()
        return self._known(self._reading).frontier

    @property
    def reach(self) -> int:
        """The same for the step at hand."""
        self._learn()
        return self._curve(self._expected).frontier

    @property
    def work(self) -> Work:
        """What the step at hand does without drafts."""
        return self._expected

    @property
    def turning(self) -> float:
        """What steps without drafts take longer in all behind one with drafts, in such steps."""
        self._learn()
        return _COLD * self._colder

    def expect(self, work: Work) -> None:
        """The step at hand does this work, or with drafts a little more."""
        self._expected = work

    def observe(self, rows: int, seconds: float) -> None:
        """The step at hand had so many rows and took so long."""
        if rows < 1 or seconds <= 0:
            return
        self._taken.append(_Step(self._expected, rows, seconds))
        if len(self._taken) == _LONGEST:
            self._learn()

    def seconds(self, rows: Sequence[int]) -> list[float]:
        """Estimates for the step at hand with so many rows, fewest first.

        Below the fewest measured they fall in proportion, above the most they stay.
        """
        self._learn()
        expected = self._expected
        pairs = self._slopes.pair * expected.pairs / max(expected.rows, 1)
        cells = self._slopes.cell * expected.cells
        known, bare = self._known(self._curve(expected)).draw(self._slopes, rows[0])
        return [self._pace * (_between(known, bare, count) + (cells + pairs * count)) for count in rows]

    def estimate(self, work: Work) -> float:
        """The estimate for some work."""
        self._learn()
        known, bare = self._known(self._curve(work)).draw(self._slopes, work.rows)
        return self._pace * (_between(known, bare, work.rows) + self._slopes.seconds(work.cells, work.pairs))

    def grown(self, work: Work, start: int, most: int) -> Floats:
        """Estimates for some work with 1 to `most` rows more, of a prompt that stands at `start`."""
        self._learn()
        more = np.arange(1, most + 1)
        pairs = work.pairs + more * start + more * (more + 1) // 2
        cells = work.cells + start + more
        looking = self._slopes.cell * cells + self._slopes.pair * pairs
        known, bare = self._known(self._reading).draw(self._slopes, work.rows)
        seconds: Floats = self._pace * (np.interp(work.rows + more, known, bare) + looking)
        return seconds

    def measured(self, rows: int) -> int:
        """Steps like that at hand, of about so many rows, that were measured."""
        self._learn()
        points = self._curve(self._expected).points
        return sum(point.count for point in points if _ABOUT * rows <= point.rows <= rows / _ABOUT)

    def is_young(self, rows: int) -> bool:
        """Whether steps like that at hand, of so many rows, were measured among the first steps of all only."""
        self._learn()
        point = self._curve(self._expected).near(rows)
        return point is not None and self._was_young(point)

    def ages(self, rows: Sequence[int]) -> list[float]:
        """Steps since something near each row count was measured in steps like that at hand."""
        self._learn()
        points = [self._curve(self._expected).near(count) for count in rows]
        return [float(self._steps - (0 if point is None else point.step)) for point in points]

    def _learn(self) -> None:
        """What was put down becomes known."""
        taken, self._taken = self._taken, []
        for _, group in groupby(taken, attrgetter("like")):
            alike = list(group)
            for at in range(0, len(alike), _AT_ONCE):
                self._take(alike[at : at + _AT_ONCE])

    def _take(self, alike: list[_Step]) -> None:
        """Steps that are alike and followed each other."""
        self._steps += len(alike)
        cold, warm = self._parted(alike)
        rows, middle = alike[0].rows, alike[len(alike) // 2]
        work, seconds = middle.work.scaled(rows), median_low([step.seconds for step in warm or cold]) / self._pace
        curve = self._curve(work)
        point = curve.near(rows)
        if point is None:
            curve.add(_Point(float(rows), work.cells, work.pairs, seconds, len(warm or cold), self._steps))
            return
        if warm:
            self._compare(point, work, seconds, len(warm))
        for step in cold:
            longer = step.seconds / self._pace / point.expected(work, self._slopes) - 1
            self._colder += _LATEST * (min(max(longer, 0.0), 1.0) - self._colder)

    def _parted(self, alike: list[_Step]) -> tuple[list[_Step], list[_Step]]:
        """Those without drafts that follow some closely, and the others."""
        if alike[0].rows > alike[0].work.rows:
            self._plain = 0
            return [], alike
        cold = max(_COLD - self._plain, 0)
        self._plain += len(alike)
        return alike[:cold], alike[cold:]

    def _compare(self, point: _Point, work: Work, seconds: float, count: int) -> None:
        """Steps of about as many rows as a point took so long: some of that is said of the machine, or of looking."""
        if point.step + _FRESH < self._steps:
            point.count = min(point.count, _OLD)
        if self._was_young(point):
            point.count = 1
        if point.count >= 2:
            expected = point.expected(work, self._slopes)
            self._slopes.take(point, work, _pulled(seconds, expected, _TWICE))
            seconds = _pulled(seconds, expected, _CLAMP)
        if point.count < _KNOWN:
            point.take(work, seconds, self._steps, count, _WEIGHT)
            return
        if self._usual is None or self._usual.step + _FRESH < self._steps:
            self._usual = point
        if point is self._usual:
            # By factors: else ups and downs of the same size would not come to nothing, and the pace would drift.
            slower = (seconds / expected) ** (1 - (1 - _PACE) ** count)
            self._pace *= slower
            point.take(work, seconds / slower, self._steps, count, _OWN)
        else:
            point.take(work, seconds, self._steps, count, _FIRM)

    def _was_young(self, point: _Point) -> bool:
        """Whether a point was measured in the first steps of all only, and these are over."""
        return point.step <= _WARM < self._steps

    def _curve(self, work: Work) -> _Curve:
        return self._reading if work.reads else self._telling

    def _known(self, curve: _Curve) -> _Curve:
        """A curve, or the other one as long as nothing is known of it."""
        return curve if curve.points else self._telling if curve is self._reading else self._reading


_rows = attrgetter("rows")


def _doubted(point: _Point, neighbour: _Point) -> bool:
    return point.count < 3 or point.step + _FRESH < neighbour.step


def _between(known: Sequence[float], seconds: Sequence[float], rows: int) -> float:
    """Seconds on the straight lines; behind the last point they stay."""
    at = bisect_left(known, rows)
    if at == len(known):
        return seconds[-1]
    if at == 0:
        return seconds[0]
    share = (rows - known[at - 1]) / (known[at] - known[at - 1])
    return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])


def _pulled(seconds: float, expected: float, most: float) -> float:
    """A measurement, no farther from what was expected than by the factor `most`."""
    return min(max(seconds, (2 - most) * expected), most * expected)
