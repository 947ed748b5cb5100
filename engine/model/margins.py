"""Decisions by tolerance, and their margins: the distance of each measured error from its threshold.

`within` decides; inside a block of `recording`, the narrowest margin of each decision and outcome is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Margin:
    """The margin of a decision: the `measured` error, and the largest `allowed` one."""

    decision: str
    measured: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether the error is within the tolerance; NaN never is."""
        return self.measured <= self.allowed

    @property
    def factor(self) -> float:
        """The factor by which the error may change without changing the outcome, at least 1."""
        low, high = sorted((self.measured, self.allowed))
        return math.inf if low == 0.0 or math.isnan(low) or math.isnan(high) else high / low

    def __str__(self) -> str:
        relation = "<=" if self.holds else ">"
        return f"{self.decision}: {self.measured:.2g} {relation} {self.allowed:.2g}, margin {self.factor:.3g}"


class Margins:
    """The narrowest margins of a recording, one for each decision and outcome."""

    def __init__(self) -> None:
        self._narrowest: dict[tuple[str, bool], Margin] = {}

    def add(self, margin: Margin) -> None:
        """Record a margin if it is the narrowest of its decision and outcome."""
        key = (margin.decision, margin.holds)
        narrowest = self._narrowest.get(key)
        if narrowest is None or margin.factor < narrowest.factor:
            self._narrowest[key] = margin

    @property
    def narrowest(self) -> tuple[Margin, ...]:
        """The recorded margins, the narrowest first."""
        return tuple(sorted(self._narrowest.values(), key=lambda margin: margin.factor))


_recording: ContextVar[Margins | None] = ContextVar("margins", default=None)


def within(decision: str, measured: float, allowed: float) -> bool:
    """Whether an error is within a tolerance; records the margin."""
    margin = Margin(decision, measured, allowed)
    margins = _recording.get()
    if margins is not None:
        margins.add(margin)
    return margin.holds


@contextmanager
def recording() -> Iterator[Margins]:
    """Record the margins of the decisions inside the block."""
    margins = Margins()
    token = _recording.set(margins)
    try:
        yield margins
    finally:
        _recording.reset(token)
