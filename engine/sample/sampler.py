"""The sampling rule: one token as a function of (logits, text so far, parameters, seed, position).

    token = argmax over the tokens that pass the filters of  z' / temperature + noise(seed, position, token)

with z' = logits + bias - penalties, and minus infinity for forbidden tokens. At temperature 0 there is no noise and no
filter; ties go to the lowest id. The rule does not depend on the batch or the step, so drafts verified with it never
change the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Protocol

import torch
from torch import Tensor

from engine.sample.constraints import Constraints
from engine.sample.filters import column, filter_mask
from engine.sample.logprobs import LogprobQuery, at_least_float32, token_logprobs
from engine.sample.noise import gumbel, uniform
from engine.sample.penalties import PenaltyHistory
from engine.types.events import Logprob, TokenLogprob
from engine.types.request import SamplingParams

# A lower temperature is greedy: the division would leave the arg max alone, and overflow.
_MIN_TEMPERATURE = 1e-5
# Noise lane of the XTC draw; lane 0 is for tokens.
_XTC_LANE = 2**32 - 1


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """How to sample the token at `position` of a text, counted from the start of the prompt."""

    params: SamplingParams
    seed: int
    position: int
    history: PenaltyHistory
    constraints: Constraints | None = None

    @property
    def greedy(self) -> bool:
        """Whether the token is the arg max, without noise."""
        return self.params.temperature < _MIN_TEMPERATURE

    @property
    def modifies_logits(self) -> bool:
        """Whether bias, penalties or constraints change the logits."""
        return bool(self.params.logit_bias) or self.constraints is not None or not self.history.inactive

    @property
    def masks_by_logits(self) -> bool:
        """Whether the tokens that constraints allow depend on the logits."""
        return self.constraints is not None and self.constraints.reads_logits

    @property
    def argmax_only(self) -> bool:
        """Whether the token is the arg max of the raw logits."""
        return self.greedy and not self.modifies_logits

    @property
    def has_floor_filters(self) -> bool:
        """Whether top-k, top-p and min-p are the only filters."""
        return self.params.typical_p == 1.0 and self.params.top_n_sigma == 0.0 and self.params.xtc is None

    def after_each(self, tokens: Sequence[int]) -> list[SamplingContext]:
        """The contexts before the first of `tokens` and after each of them."""
        if not tokens or self.argmax_only:
            return [self] * (len(tokens) + 1)
        return [self.after(tokens[:count]) for count in range(len(tokens) + 1)]

    def after(self, tokens: Sequence[int]) -> SamplingContext:
        """The context of the token after `tokens`."""
        if not tokens:
            return self
        constraints = None if self.constraints is None else self.constraints.after(tokens)
        position, history = self.position + len(tokens), self.history.after(tokens)
        return replace(self, position=position, history=history, constraints=constraints)


def sample_tokens(logits: Tensor, contexts: Sequence[SamplingContext]) -> list[int | None]:
    """The next token of each row of logits [rows, vocabulary]; None for a row without finite maximum.

    NaN or infinity in one row, or constraints that forbid every token, affect that row alone.
    """
    modified, tokens = list[Tensor](), list[int | None]()
    # Row by row: a row stays in the processor's cache between the passes.
    for row, context in zip(at_least_float32(logits), contexts, strict=True):
        modified.append(modified_logits(row, context))
        tokens.append(_argmax(modified[-1]))
    random = [row for row, context in enumerate(contexts) if tokens[row] is not None and not context.greedy]
    if random:
        rows = torch.stack([modified[row] for row in random])
        for row, token in zip(random, _sample_rows(rows, [contexts[row] for row in random]).tolist(), strict=True):
            tokens[row] = token
    return tokens


def modified_logits(row: Tensor, context: SamplingContext) -> Tensor:
    """A row of logits [vocabulary] after bias, penalties and constraints; the input is unchanged."""
    modified = row
    if context.params.logit_bias or not context.history.inactive:
        modified = row.clone()
        if context.params.logit_bias:
            ids, values = zip(*context.params.logit_bias, strict=True)
            index = torch.tensor(ids, device=row.device)
            modified.index_add_(0, index, torch.tensor(values, dtype=modified.dtype, device=row.device))
        context.history.penalise(modified, context.params)
    return modified if context.constraints is None else context.constraints.masked(modified)


def _argmax(row: Tensor) -> int | None:
    """The arg max of a row, the first of several; None where its maximum is not finite."""
    # numpy takes a sixth of torch's time; both treat NaN as the maximum.
    token = int(row.numpy().argmax() if row.device.type == "cpu" else row.argmax())
    return token if isfinite(row[token].item()) else None


def _sample_rows(logits: Tensor, contexts: Sequence[SamplingContext]) -> Tensor:
    """One token for each row [rows]: the arg max of scaled logits plus noise over the tokens that pass the filters."""
    scaled = logits / column(logits, [context.params.temperature for context in contexts])
    mask = filter_mask(scaled, [context.params for context in contexts], [_xtc_draw(context) for context in contexts])
    rows, tokens = mask.nonzero(as_tuple=True)
    seeds = torch.tensor([as_int64(context.seed) for context in contexts], device=logits.device)
    positions = torch.tensor([context.position for context in contexts], device=logits.device)
    scores = torch.full(scaled.shape, -torch.inf, dtype=torch.float64, device=logits.device)
    scores[rows, tokens] = scaled[rows, tokens].double() + gumbel(seeds[rows], positions[rows], tokens)
    return scores.argmax(-1)


def _xtc_draw(context: SamplingContext) -> float:
    """The uniform number in (0, 1) that decides whether XTC applies."""
    if context.params.xtc is None:
        return 1.0
    seed, position, token = (torch.tensor([value]) for value in (as_int64(context.seed), context.position, 0))
    return float(uniform(seed, position, token, _XTC_LANE))


def as_int64(seed: int) -> int:
    """A 64-bit seed as a signed number."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed


class Sampler(Protocol):
    """Samples tokens from logits: TorchSampler, NativeSampler (engine/native) or DeviceSampler (device_sampler.py)."""

    def sample(self, logits: Tensor, contexts: Sequence[SamplingContext]) -> list[int | None]:
        """The next token of each row of logits [rows, vocabulary]; None where the row has no finite maximum."""
        ...

    def report(self, logits: Tensor, rows: Sequence[int], queries: Sequence[LogprobQuery]) -> LogitReport:
        """Samples and log-probabilities of the logits of a step.

        rows     to sample from
        queries  that may follow, with SAMPLED for a token that is sampled; at most one for each row
        """
        ...


class LogitReport(Protocol):
    """Samples and log-probabilities of the logits of one step."""

    def sample(self, contexts: Sequence[SamplingContext]) -> list[int | None]:
        """The next token of each row to sample from; called once, before the other method."""
        ...

    def token_logprobs(
        self, queries: Sequence[LogprobQuery], describe: Callable[[int, float], Logprob]
    ) -> Iterator[TokenLogprob | None]: ...


class HostReport:
    """Implements LogitReport row by row, by a sampler."""

    def __init__(self, sampler: Sampler, logits: Tensor, rows: Sequence[int]) -> None:
        self._sampler, self._logits, self._rows = sampler, logits, rows

    def sample(self, contexts: Sequence[SamplingContext]) -> list[int | None]:
        is_all = len(self._rows) == len(self._logits)
        return self._sampler.sample(self._logits if is_all else self._logits[self._rows], contexts)

    def token_logprobs(
        self, queries: Sequence[LogprobQuery], describe: Callable[[int, float], Logprob]
    ) -> Iterator[TokenLogprob | None]:
        return token_logprobs(self._logits, queries, describe)


class TorchSampler:
    """Samples by `sample_tokens`; implements Sampler."""

    def sample(self, logits: Tensor, contexts: Sequence[SamplingContext]) -> list[int | None]:
        return sample_tokens(logits, contexts)

    def report(self, logits: Tensor, rows: Sequence[int], queries: Sequence[LogprobQuery]) -> LogitReport:
        return HostReport(self, logits, rows)
