"""Repetition, frequency, presence and DRY penalties, with the token history of one sequence."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.types.request import Dry, SamplingParams

# Limit of the DRY exponent: at the usual base no logit is left beyond it, and repetitive text stays cheap.
_MAX_EXCESS_TOKENS = 64


class PenaltyHistory:
    """The tokens of one sequence that its penalties depend on; empty if no penalty is set."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocabulary: int) -> None:
        # The distinct tokens of prompt and output, and their counts in the output.
        self._seen: NDArray[np.int64] | None = None
        self._counts = np.empty(0, np.int32)
        # With a lookback: the last tokens of prompt and output, and how many of them are output. They are counted when
        # they are read, since many may be added before: the tokens of an earlier stream.
        self._lookback, self._recent, self._generated, self._is_counted = params.penalty_lookback, list[int](), 0, True
        self._tokens: list[int] | None = None
        if params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0:
            if self._lookback is not None:
                self._recent = list(prompt[max(len(prompt) - self._lookback, 0) :])
                prompt = self._recent
            self._seen = np.unique(np.asarray(prompt, np.int64))
            self._counts = np.zeros(len(self._seen), np.int32)
        if params.dry is not None and params.dry.multiplier > 0.0:
            self._tokens = list(prompt)

    @property
    def inactive(self) -> bool:
        """Whether no penalty is set."""
        return self._seen is None and self._tokens is None

    def append(self, token: int) -> None:
        """Add a token of the output."""
        if self._seen is not None and self._lookback is not None:
            self._recent.append(token)
            self._generated, self._is_counted = self._generated + 1, False
        elif self._seen is not None:
            self._count(self._seen, token)
        if self._tokens is not None:
            self._tokens.append(token)

    def _count_window(self, lookback: int) -> None:
        del self._recent[: max(len(self._recent) - lookback, 0)]
        recent = np.asarray(self._recent, np.int64)
        self._generated, self._is_counted = min(self._generated, len(recent)), True
        is_output = np.arange(len(recent)) >= len(recent) - self._generated
        self._seen, places = np.unique(recent, return_inverse=True)
        self._counts = np.bincount(places, is_output, len(self._seen)).astype(np.int32)

    def _count(self, seen: NDArray[np.int64], token: int) -> None:
        index = np.flatnonzero(seen == token)
        if not len(index):
            self._seen, self._counts = np.append(seen, token), np.append(self._counts, np.int32(1))
        else:
            self._counts[index] += 1

    def after(self, tokens: Sequence[int]) -> PenaltyHistory:
        """The history with `tokens` appended to the output; this one is unchanged."""
        if not tokens or self.inactive:
            return self
        longer = copy.copy(self)
        longer._counts, longer._recent = self._counts.copy(), list(self._recent)
        longer._tokens = None if self._tokens is None else list(self._tokens)
        for token in tokens:
            longer.append(token)
        return longer

    def penalise(self, logits: Tensor, params: SamplingParams) -> None:
        """Apply the penalties to one row of logits [vocabulary] in place.

        Repetition as in transformers (prompt and output), frequency and presence as in OpenAI's API (output only), DRY
        as in llama.cpp (prompt and output).
        """
        if self._seen is not None:
            self._penalise_tokens(logits, params)
        tokens, penalties = self.dry_penalties(params)
        if tokens:
            logits[torch.tensor(tokens, device=logits.device)] -= penalties.to(logits)

    def token_counts(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The distinct tokens with a repetition, frequency or presence penalty, and their counts in the output."""
        if self._lookback is not None and not self._is_counted:
            self._count_window(self._lookback)
        return (np.empty(0, np.int64) if self._seen is None else self._seen), self._counts

    def dry_penalties(self, params: SamplingParams) -> tuple[list[int], Tensor]:
        """The tokens with a DRY penalty, and the penalties in float64."""
        lengths = {} if self._tokens is None or params.dry is None else repetitions(self._tokens, params.dry)
        if params.dry is None or not lengths:
            return [], torch.empty(0, dtype=torch.float64)
        excess = torch.tensor(list(lengths.values()), dtype=torch.float64) - params.dry.allowed_length
        return list(lengths), params.dry.multiplier * torch.tensor(params.dry.base, dtype=torch.float64) ** excess

    def _penalise_tokens(self, logits: Tensor, params: SamplingParams) -> None:
        seen, output_counts = self.token_counts()
        index, counts = torch.from_numpy(seen).to(logits.device), output_counts.astype(np.float32)
        values, factor = logits[index].numpy(force=True), params.repetition_penalty
        if factor != 1.0:
            values = np.where(values > 0, values / factor, values * factor)
        values = values - (
            params.frequency_penalty * counts + params.presence_penalty * (counts > 0).astype(np.float32)
        )
        logits[index] = torch.from_numpy(values).to(logits.device)


def repetitions(tokens: Sequence[int], dry: Dry) -> dict[int, int]:
    """The tokens that would continue a repetition, with its length so far: at least the allowed length.

    A repetition contains no breaker.
    """
    recent = np.asarray(tokens if dry.lookback < 0 else tokens[max(len(tokens) - dry.lookback, 0) :], np.int64)
    end = len(recent) - 1
    breakers = np.flatnonzero(np.isin(recent, dry.breakers))
    longest = min(end - int(breakers[-1]) if len(breakers) else end, dry.allowed_length + _MAX_EXCESS_TOKENS)
    lengths: dict[int, int] = {}
    # Indices at which earlier occurrences of the last `length` tokens end.
    matches = np.flatnonzero(recent[:-1] == recent[-1:]) if end > 0 else np.empty(0, np.int64)
    for length in range(1, longest + 1):
        if not len(matches):
            break
        if length >= dry.allowed_length:
            lengths.update(dict.fromkeys(recent[matches + 1].tolist(), length))
        matches = matches[matches >= length]
        matches = matches[recent[matches - length] == recent[end - length]]
    return lengths
