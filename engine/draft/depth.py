"""Draft depth: the interface of speculation with what chooses it, and the depth that is always the same.

controller.py has the one that is chosen at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.schedule.step_cost import StepCost


class Candidate(NamedTuple):
    """A sequence with a drafter: at most `limit` draft tokens."""

    kind: str
    limit: int


class DraftCall(NamedTuple):
    """One call of a drafter, of up to `depth` tokens a sequence.

    catches_up  whether the drafter computed more of a text than the tokens since its last draft
    """

    kind: str
    depth: int
    seconds: float
    catches_up: bool = False


class VerifiedDraft(NamedTuple):
    """Of a draft, `verified` tokens were compared with the output; the first `accepted` of them were equal."""

    kind: str
    verified: int
    accepted: int


@dataclass(slots=True)
class StepOutcome:
    """Measurements of one step.

    batch_tokens  of the step without drafts
    seconds       of the step without the calls of drafters
    unused        seconds of drafters that were asked and gave no draft for any sequence
    """

    batch_tokens: int = 0
    draft_tokens: int = 0
    seconds: float = 0.0
    calls: list[DraftCall] = field(default_factory=list)
    verified: list[VerifiedDraft] = field(default_factory=list)
    unused: dict[str, float] = field(default_factory=dict)


class Depth(Protocol):
    """Chooses the depth of drafts. `cost` has the step costs measured from outcomes."""

    cost: StepCost

    def cooldown(self, kind: str, batch_tokens: int) -> int:
        """Steps of this batch size for which a drafter is not asked; 0: it is asked in this one."""

    def prefers(self, kind: str, other: str) -> bool:
        """Whether drafts of `kind` are taken where `other` could draft too."""

    def choose(self, candidates: Sequence[Candidate], *, batch_tokens: int) -> list[int]:
        """Tokens to draft for each candidate, in a step of batch_tokens without their drafts."""

    def observe(self, outcome: StepOutcome) -> None:
        """Measure a step."""


class FixedDepth:
    """The same depth for all sequences and steps; implements Depth."""

    def __init__(self, depth: int, cost: StepCost | None = None) -> None:
        self._depth, self.cost = depth, cost or StepCost()

    def cooldown(self, kind: str, batch_tokens: int) -> int:
        """Long at depth 0, else 0."""
        return 0 if self._depth else 2**16

    def prefers(self, kind: str, other: str) -> bool:
        """Always."""
        return True

    def choose(self, candidates: Sequence[Candidate], *, batch_tokens: int) -> list[int]:
        """The depth, within the limit of each candidate."""
        return [min(self._depth, candidate.limit) for candidate in candidates]

    def observe(self, outcome: StepOutcome) -> None:
        """Measure the step for the prefill budget."""
        self.cost.observe(outcome.batch_tokens + outcome.draft_tokens, outcome.seconds)
