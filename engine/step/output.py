"""The output of one forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.sample.sampler import LogitReport, Sampler
from engine.step.input import StepInput


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a runner returns for a StepInput.

    logits         [logit_rows, vocabulary] without `sampling`; else empty
    tokens         the token of each sampled row; None where its logits are not finite
    report         the log-probabilities of the queries
    hidden_states  by layer of `hidden`: [rows, width]
    """

    logits: Tensor = torch.empty(0)
    tokens: Sequence[int | None] = ()
    report: LogitReport | None = None
    hidden_states: Mapping[int, Tensor] = field(default_factory=dict)


def sampled_output(
    step: StepInput, sampler: Sampler, logits: Tensor, hidden_states: Mapping[int, Tensor]
) -> StepOutput:
    """The output of a step with these logits, sampled as it requires."""
    sampling = step.sampling
    if sampling is None:
        return StepOutput(logits, hidden_states=hidden_states)
    if sampling.queries is None:
        tokens = sampler.sample(logits if sampling.rows is None else logits[sampling.rows], sampling.contexts)
        return StepOutput(tokens=tokens, hidden_states=hidden_states)
    rows = range(len(logits)) if sampling.rows is None else sampling.rows
    report = sampler.report(logits, rows, sampling.queries)
    return StepOutput(tokens=report.sample(sampling.contexts), report=report, hidden_states=hidden_states)
