"""The input of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.sample.logprobs import LogprobQuery
from engine.sample.sampler import SamplingContext
from engine.step.encoder_mask import EncoderMask
from kvcache.forward import Forward


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which rows of the logits of a step are sampled, and how.

    contexts  of the sampled rows, in order
    rows      of the logits; None: all
    queries   of the log-probabilities that are read afterwards, with SAMPLED for a sampled token, at most one for each
              row of logits; None: there are none, and the logits may stay inside the runner
    """

    contexts: Sequence[SamplingContext]
    rows: Sequence[int] | None = None
    queries: Sequence[LogprobQuery] | None = None


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """What a step requires of its runner besides causal spans and logits.

    hidden_states  before the output layer are returned
    bidirectional  tokens of a range attend to each other
    encoder        tokens attend to the output of an encoder
    """

    hidden_states: bool = False
    bidirectional: bool = False
    encoder: bool = False


@dataclass(frozen=True, slots=True)
class StepInput:
    """All that one forward computes and returns; a runner reads nothing else.

    forward        open: spans, cells, states
    tokens         of all spans, concatenated
    logit_rows     batch tokens with logits, ascending
    hidden_rows    batch tokens whose hidden states before the output layer are returned, ascending
    encoder_masks  the encoder output that each span attends to, None: none; empty: none for all spans
    sampling       None: the logits are returned
    """

    forward: Forward
    tokens: Sequence[int]
    logit_rows: Sequence[int]
    hidden_rows: Sequence[int] = ()
    encoder_masks: Sequence[EncoderMask | None] = ()
    sampling: Sampling | None = None

    @property
    def features(self) -> StepFeatures:
        """What the step requires of its runner."""
        return StepFeatures(
            hidden_states=bool(self.hidden_rows),
            bidirectional=any([span.bidirectional for span in self.forward.spans]),
            encoder=any(self.encoder_masks),
        )
