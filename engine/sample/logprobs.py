"""Log-probabilities of sampled tokens, and of prompt tokens, which arrive with the chunks of the prefill.

They are computed from the raw logits: before temperature, penalties, bias, filters and grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.types.events import Logprob, PromptScored, TokenLogprob
from engine.types.request import Request

LogitRow: TypeAlias = NDArray[np.floating[Any]]

# In a query, the token that will be sampled from its row.
SAMPLED = -1
# Tokens of a block in `top_tokens`: only blocks with the largest maxima are searched.
_BLOCK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class LogprobQuery:
    """The log-probabilities needed of one row of logits: of `token`, of the `top_count` top tokens, and of `labels`."""

    row: int
    token: int
    top_count: int
    labels: tuple[int, ...] = ()

    @classmethod
    def for_request(cls, request: Request, row: int, token: int) -> LogprobQuery:
        """The query of a token of a request."""
        return cls(row, token, request.logprobs or 0, request.label_tokens)


class PromptScores:
    """Log-probabilities of a prompt's tokens from `start` on, collected with the rows of logits.

    The row of a token's predecessor gives its log-probability; the first token of the prompt has none (None).
    """

    def __init__(self, prompt: Sequence[int], start: int) -> None:
        self._prompt, self._start = prompt, start
        self._entries: list[TokenLogprob | None] = [None] if start == 0 else []

    @property
    def next_position(self) -> int:
        """The first position with a missing row of logits; the last position if none is missing."""
        return self._start + len(self._entries) - 1

    def logit_positions(self, start: int, stop: int) -> range:
        """The positions in [start, stop) with a missing row of logits."""
        return range(max(start, self.next_position), min(stop, len(self._prompt) - 1))

    def extend(self, entries: Sequence[TokenLogprob]) -> None:
        """Add the log-probabilities of the next rows."""
        self._entries += entries

    def event(self) -> PromptScored:
        """All log-probabilities, after the last row."""
        return PromptScored(tuple(self._prompt[self._start :]), tuple(self._entries))


def token_logprobs(
    logits: Tensor, queries: Sequence[LogprobQuery], describe: Callable[[int, float], Logprob]
) -> Iterator[TokenLogprob | None]:
    """The answers to queries on rows of logits [rows, vocabulary], in order; None for a row without finite maximum.

    describe  makes a Logprob of a token and its log-probability
    """
    for query in queries:
        # Row by row: a row of 150,000 tokens stays in the processor's cache between the passes.
        row = at_least_float32(logits[query.row]).log_softmax(-1)
        # Without a finite maximum every entry is NaN.
        yield None if row[0].isnan() else _token_logprob(query, row, describe)


def at_least_float32(logits: Tensor) -> Tensor:
    """The logits in float32 or better."""
    return logits if logits.dtype.itemsize >= torch.float32.itemsize else logits.float()


def top_tokens(values: Tensor, count: int) -> list[tuple[int, float]]:
    """The `count` tokens of one row with the largest values, and the values; ties by token id."""
    # numpy: after a forward each torch operation costs about 10 microseconds.
    row: LogitRow = values.numpy(force=True)
    count = min(count, len(row))
    if count == 0:
        return []
    tokens = _candidates(row, count)
    tokens = tokens[np.argsort(-row[tokens], kind="stable")[:count]]
    return list(zip(tokens.tolist(), row[tokens].tolist(), strict=True))


def _candidates(row: LogitRow, count: int) -> NDArray[np.int64]:
    """Tokens, by id, that include the `count` largest values of a row and all ties with the last of them."""
    blocks = len(row) // _BLOCK_TOKENS
    if blocks < 2 * count:
        return np.arange(len(row))
    maxima = row[: blocks * _BLOCK_TOKENS].reshape(blocks, _BLOCK_TOKENS).max(1)
    # At least `count` values reach this one: the maxima of `count` blocks.
    least = np.partition(maxima, blocks - count)[blocks - count]
    searched = np.flatnonzero(maxima >= least)[:, None] * _BLOCK_TOKENS + np.arange(_BLOCK_TOKENS)
    tokens = np.concatenate((searched.ravel(), np.arange(blocks * _BLOCK_TOKENS, len(row))))
    candidates: NDArray[np.int64] = tokens[row[tokens] >= least]
    return candidates


def _token_logprob(query: LogprobQuery, row: Tensor, describe: Callable[[int, float], Logprob]) -> TokenLogprob:
    named = (query.token, *query.labels)
    chosen, *labels = (describe(*pair) for pair in zip(named, row[list(named)].tolist(), strict=True))
    return TokenLogprob(chosen, tuple(describe(*pair) for pair in top_tokens(row, query.top_count)), tuple(labels))
