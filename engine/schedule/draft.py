"""Draft tokens, and the interface of drafters.

A drafter may propose any tokens at any time: proposals change how fast an output is computed, never the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol

from torch import Tensor

from engine.sample.sampler import SamplingContext


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence to draft for.

    sequence_id  names the sequence as long as it runs
    tokens       the context, valid during the call only; the last one is not computed yet
    limit        maximum tokens to propose
    draw         how the next token will be sampled; drafts sampled with the same noise are accepted more often
    salt         nothing that was kept under one salt is proposed under another
    prediction   the output that the client expects
    emitted      number of output tokens so far
    cacheable    whether tokens and output may be kept after the sequence
    """

    sequence_id: str
    tokens: Sequence[int]
    limit: int
    draw: SamplingContext
    salt: bytes = b""
    prediction: Sequence[int] = ()
    emitted: int = 0
    cacheable: bool = True


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """Context tokens of a sequence from `start` on that a step computed, and their hidden states [tokens, width]."""

    request: DraftRequest
    start: int
    hidden_states: Tensor


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed next tokens, and the kind of their drafter."""

    kind: str
    tokens: tuple[int, ...]

    def before_content(self, vocabulary: int) -> Draft | None:
        """The draft up to a placeholder of a content, which is no token of the vocabulary; None if nothing is left."""
        if max(self.tokens) < vocabulary:
            return self
        tokens = tuple(takewhile(vocabulary.__gt__, self.tokens))
        return replace(self, tokens=tokens) if tokens else None


class Drafter(Protocol):
    """Proposes tokens. Acceptance rates are measured by `kind`."""

    @property
    def kind(self) -> str:
        """The drafter's name in requests and metrics."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Next tokens for each request, up to its limit; none without a proposal."""

    def forget(self, sequence_id: str, output: Sequence[int]) -> None:
        """Release a finished sequence, given its whole output."""

    def flush(self, budget_bytes: int) -> bool:
        """Write up to `budget_bytes` to the disk cache; False: nothing is left to write."""


class HiddenStateDrafter(Drafter, Protocol):
    """A drafter that reads hidden states of the model."""

    def read_hidden_states(self, computed: Sequence[ComputedTokens]) -> None:
        """Take the hidden states of a step. Rejected draft tokens are not among the computed ones."""
