"""What a step costs by its rows, learnt from the steps that were taken.

Where nothing was measured the estimate errs towards cheap: what looks cheap is tried, and trying measures it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]

# Weight of a new measurement, and how far one may pull: a step can wait for the machine, but none is done too early.
_WEIGHT, _CLAMP = 0.15, 0.25
# Row counts closer than this share a point.
_RESOLUTION = 0.06
# Steps after which a measurement gives way to one that contradicts it.
_FRESH = 100


@dataclass(slots=True)
class _Point:
    """Steps of about so many rows: their mean rows and seconds, how many there were, and when the latest was."""

    rows: float
    seconds: float
    count: int
    step: int

    def take(self, rows: int, seconds: float, step: int) -> None:
        """One more measurement."""
        self.count += 1
        weight = max(_WEIGHT, 1 / self.count)
        pulled = seconds if self.count <= 2 else min(max(seconds / self.seconds, 1 - _CLAMP), 1 + _CLAMP) * self.seconds
        # The first steps of a size may have to set something up: of two, the faster one is right.
        self.seconds = min(self.seconds, pulled) if self.count == 2 else self.seconds + weight * (pulled - self.seconds)
        self.rows += weight * (rows - self.rows)
        self.step = step


class StepCost:
    """Seconds a step by rows: measured points with straight lines between them."""

    def __init__(self) -> None:
        self._points: list[_Point] = []
        self._steps = 0
        self._curve: tuple[Floats, Floats] | None = None

    @property
    def frontier(self) -> int:
        """Rows up to which an estimate means something: twice the most that were measured."""
        return int(2 * self._points[-1].rows) if self._points else 0

    def observe(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        if rows < 1 or seconds <= 0:
            return
        self._steps += 1
        self._curve = None
        point = min(self._points, key=lambda point: abs(point.rows - rows), default=None)
        if point is not None and abs(point.rows - rows) <= _RESOLUTION * rows:
            point.take(rows, seconds, self._steps)
        else:
            self._points.append(_Point(float(rows), seconds, 1, self._steps))
            self._points.sort(key=lambda point: point.rows)

    def seconds(self, rows: Numbers) -> Floats:
        """Estimates for row counts. Below the fewest measured they fall in proportion, above the most they stay."""
        if self._curve is None:
            self._curve = self._draw()
        known, seconds = self._curve
        return np.interp(rows, known, seconds)

    def ages(self, rows: Numbers) -> Floats:
        """Steps since something near each row count was measured."""
        known = np.array([point.rows for point in self._points])
        steps = np.array([point.step for point in self._points])
        at = np.searchsorted((known[1:] + known[:-1]) / 2, rows)
        near = np.abs(known[at] - rows) <= _RESOLUTION * rows
        return np.where(near, self._steps - steps[at], self._steps).astype(np.float64)

    def _draw(self) -> tuple[Floats, Floats]:
        """The points, less what newer ones contradict: more rows cost no less, and n times the rows n times at most."""
        points = self._points
        rows = np.array([0.0, *(point.rows for point in points)])
        seconds = np.array([0.0, *(point.seconds for point in points)])
        for at in range(len(points) - 1, 0, -1):
            if self._doubted(points[at - 1], points[at]):
                seconds[at] = min(seconds[at], seconds[at + 1])
        for at in range(1, len(points)):
            if self._doubted(points[at], points[at - 1]):
                seconds[at + 1] = min(seconds[at + 1], seconds[at] * rows[at + 1] / rows[at])
        return rows, seconds

    def _doubted(self, point: _Point, neighbour: _Point) -> bool:
        return point.count < 3 or point.step + _FRESH < neighbour.step
