"""Goals for the ratio of Cellar to a peer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.cells import COLD, DECODE, FASTER, PREFILL, RATE, Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Ratios to reach.

    figures  by name
    others   for all other figures
    streams  the number of streams for which the goal of the rate counts; None: all
    reuse    cold to warm time to the first token with a cached prefix, Cellar alone
    """

    figures: Mapping[str, float] = field(default_factory=dict)
    others: float | None = None
    streams: int | None = None
    reuse: float | None = 20.0

    def of(self, cell: Cell, figure: str) -> float | None:
        """Return the goal of a figure, or None."""
        if figure == FASTER:
            return self.reuse
        if figure == COLD or (figure == RATE and self.streams not in (None, cell.work.streams)):
            return None
        return self.figures.get(figure, self.others)


GOALS = {
    "int8": Goals(figures={DECODE: 2.0, PREFILL: 3.0, RATE: 3.0}),
    "int4": Goals(figures={DECODE: 1.2, PREFILL: 2.5, RATE: 2.5}),
    "openvino": Goals(others=1.2),
    "transformers": Goals(figures={RATE: 8.0}, streams=8),
    "none": Goals(reuse=None),
}
