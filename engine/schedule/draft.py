"""The seam between the engine and whatever guesses tokens: a model, or a look at what was said before.

A drafter may say anything, at any time: what it proposes decides how fast a text comes, and never which text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.sample.sampler import SamplingContext


@dataclass(frozen=True, slots=True)
class Want:
    """One sequence that could use a draft of what comes behind `tokens`.

    sequence_id  names the sequence for as long as it lives
    tokens       what its cache is about, to be read during the call only: the latest token is the last one
    limit        tokens to propose at most
    draw         how the token behind `tokens` will be drawn; who drafts with the same noise is right more often
    salt         what is remembered for one salt is never proposed under another
    prediction   what the client expects the output to be
    said         tokens of the output so far
    """

    sequence_id: str
    tokens: Sequence[int]
    limit: int
    draw: SamplingContext
    salt: bytes = b""
    prediction: Sequence[int] = ()
    said: int = 0


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step computed of the text of a want: `length` rows from the token `start` on.

    row  the first of them in the batch
    """

    want: Want
    start: int
    row: int
    length: int


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next, and the kind of drafter that says so."""

    kind: str
    tokens: tuple[int, ...]


class Drafter(Protocol):
    """Proposes tokens. `kind` names what its guesses have in common: how often they are right is learnt by kind."""

    @property
    def kind(self) -> str:
        """A word."""

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        """For each want, tokens that may come next: its limit at most, none where there is nothing to guess from."""

    def forget(self, sequence_id: str, said: Sequence[int]) -> None:
        """The sequence is over; this is all that it said."""

    def rest(self, budget_bytes: int) -> bool:
        """Use a pause to save so much of what outlives the process; False: nothing is left."""


class Reader(Drafter, Protocol):
    """A drafter that guesses from what the model computes."""

    def computed(self, rows: Sequence[Computed]) -> None:
        """A step was computed. What was refused of drafts is not among the rows."""
