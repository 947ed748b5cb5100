"""Faults that are due in the next step."""

from __future__ import annotations

from random import Random
from typing import Literal, get_args

FaultKind = Literal[
    "forward",
    "layer",
    "sampling",
    "nan",
    "allocation",
    "drafter",
    "shift",
    "insertion",
    "reuse",
    "saving",
    "loading",
    "detokenizer",
    "matcher",
    "request",
    "queue",
    "leaving",
    "snapshot",
    "statistics",
]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
# Of the prefix cache, of drafters and of what is counted, which no output depends on: they fail no sequence. Others
# fail one at most.
HARMLESS: tuple[FaultKind, ...] = (
    "drafter",
    "insertion",
    "reuse",
    "saving",
    "loading",
    "leaving",
    "snapshot",
    "statistics",
)


class InjectedError(RuntimeError):
    """An error that the simulation raises."""


class Faults:
    """At most one fault is due; it occurs at the first place of its kind.

    occurred  faults since the last `reset`, by kind
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._due: FaultKind | None = None
        self.occurred: list[str] = []

    def plan(self, kind: FaultKind) -> None:
        """Let a fault occur from now on, until `reset`."""
        self._due = kind

    def reset(self) -> None:
        """Forget the fault that is due, and those that occurred."""
        self._due = None
        self.occurred = []

    def is_due(self, kind: FaultKind) -> bool:
        """Whether a fault occurs now."""
        if self._due != kind:
            return False
        self._due = None
        self.occurred.append(kind)
        return True

    def raise_if(self, kind: FaultKind, places: int = 1) -> None:
        """Raise MemoryError or InjectedError if a fault is due, in one of so many places of its kind."""
        if self._due == kind and (places == 1 or self.choose(places) == 0) and self.is_due(kind):
            raise MemoryError("injected") if self._random.random() < 0.5 else InjectedError(kind)

    def choose(self, count: int) -> int:
        """A number below `count`."""
        return self._random.randrange(count)
