"""What was said before, as far as it makes tokens less likely: penalties for repetition. Costs nothing without any."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.types import Dry, SamplingParams

# A repetition that is longer than allowed by so many tokens costs no more: at the usual base no logit is left by then,
# and text that is one repetition stays cheap.
_LONGEST = 64


class History:
    """What the penalties of one sequence look at: the tokens of the prompt, and those of the output."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocabulary: int) -> None:
        self._prompt: Tensor | None = None
        self._counts: Tensor | None = None
        self._tokens: list[int] | None = None
        if params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0:
            self._counts = torch.zeros(vocabulary, dtype=torch.int32)
            self._prompt = torch.zeros(vocabulary, dtype=torch.bool)
            self._prompt[torch.tensor(prompt, dtype=torch.long)] = True
        if params.dry is not None and params.dry.multiplier > 0.0:
            self._tokens = list(prompt)

    @property
    def idle(self) -> bool:
        """Whether nothing that was said makes any token less likely."""
        return self._counts is None and self._tokens is None

    def append(self, token: int) -> None:
        """Count a token of the output."""
        if self._counts is not None:
            self._counts[token] += 1
        if self._tokens is not None:
            self._tokens.append(token)

    def after(self, tokens: Sequence[int]) -> History:
        """What the penalties would look at if the output went on with `tokens`; this history stays as it is."""
        if not tokens or self.idle:
            return self
        longer = copy.copy(self)
        if self._counts is not None:
            more = torch.tensor(tokens, dtype=torch.long)
            longer._counts = self._counts.index_add(0, more, torch.ones_like(more, dtype=torch.int32))
        if self._tokens is not None:
            longer._tokens = [*self._tokens, *tokens]
        return longer

    def penalise(self, logits: Tensor, params: SamplingParams) -> None:
        """Change one row of logits [vocabulary] in place.

        Repetition as in transformers (prompt and output), frequency and presence as in OpenAI's API (output only),
        repeated sequences as in llama.cpp (prompt and output).
        """
        if self._counts is not None and self._prompt is not None:
            self._penalise_tokens(logits, params, self._counts, self._prompt)
        if self._tokens is not None and params.dry is not None:
            lengths = repetitions(self._tokens, params.dry)
            if lengths:
                index = torch.tensor(list(lengths), device=logits.device)
                excess = torch.tensor(list(lengths.values()), dtype=torch.float64) - params.dry.allowed_length
                cost = params.dry.multiplier * torch.tensor(params.dry.base, dtype=torch.float64) ** excess
                logits[index] -= cost.to(logits)

    def _penalise_tokens(self, logits: Tensor, params: SamplingParams, counts: Tensor, prompt: Tensor) -> None:
        counts = counts.to(logits.device)
        if params.repetition_penalty != 1.0:
            seen = (counts > 0) | prompt.to(logits.device)
            factor = params.repetition_penalty
            logits.copy_(torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits))
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)


def repetitions(tokens: Sequence[int], dry: Dry) -> dict[int, int]:
    """For each token that would go on with a repetition of what was said: how many tokens are repeated before it.

    Only those of the allowed length and more. A repetition has no breaker in it.
    """
    some = np.asarray(tokens if dry.last < 0 else tokens[max(len(tokens) - dry.last, 0) :], np.int64)
    end = len(some) - 1
    breakers = np.flatnonzero(np.isin(some, dry.breakers))
    longest = min(end - int(breakers[-1]) if len(breakers) else end, dry.allowed_length + _LONGEST)
    found: dict[int, int] = {}
    # Places where the last `length` tokens have been said before: those where the last one of them was.
    places = np.flatnonzero(some[:-1] == some[-1:]) if end > 0 else np.empty(0, np.int64)
    for length in range(1, longest + 1):
        if not len(places):
            break
        if length >= dry.allowed_length:
            found.update(dict.fromkeys(some[places + 1].tolist(), length))
        places = places[places >= length]
        places = places[some[places - length] == some[end - length]]
    return found
