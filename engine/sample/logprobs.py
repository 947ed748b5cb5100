"""Log-probabilities of tokens: of those that are said, and of a prompt's own, gathered while the prompt is computed.

They are those of the raw logits, before temperature, penalties, bias, filters and grammar.
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

# Tokens of a block: of a long row only the blocks are read whose highest value is among the highest of all blocks.
_BLOCK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class LogprobQuery:
    """What is wanted of one row of logits: of `token`, of the `top_count` likeliest, and of `labels`."""

    row: int
    token: int
    top_count: int
    labels: tuple[int, ...] = ()

    @classmethod
    def for_request(cls, request: Request, row: int, token: int) -> LogprobQuery:
        """What a request wants to know wherever it is told of a token."""
        return cls(row, token, request.logprobs or 0, request.label_tokens)


class PromptScores:
    """The scores of a prompt's tokens from `start` on, as far as they are known: they come with rows of logits.

    The row of the token before tells of a token; nothing tells of the very first one, whose entry is None.
    """

    def __init__(self, prompt: Sequence[int], start: int) -> None:
        self._prompt, self._start = prompt, start
        self._entries: list[TokenLogprob | None] = [None] if start == 0 else []

    @property
    def next_position(self) -> int:
        """The first position whose row is still needed; that of the last token where none is."""
        return self._start + len(self._entries) - 1

    def logit_positions(self, start: int, stop: int) -> range:
        """The positions in [start, stop) whose rows are needed, in order."""
        return range(max(start, self.next_position), min(stop, len(self._prompt) - 1))

    def extend(self, entries: Sequence[TokenLogprob]) -> None:
        """Take what the next rows told."""
        self._entries += entries

    def event(self) -> PromptScored:
        """All of it, once it is whole."""
        return PromptScored(tuple(self._prompt[self._start :]), tuple(self._entries))


def token_logprobs(
    logits: Tensor, queries: Sequence[LogprobQuery], describe: Callable[[int, float], Logprob]
) -> Iterator[TokenLogprob | None]:
    """What is asked of the rows of logits [rows, vocabulary], in order; None where a row has no finite maximum.

    describe  makes a token and its log-probability presentable
    """
    for ask in queries:
        # Row by row: one of 150,000 stays in the processor's cache between the passes.
        row = at_least_float32(logits[ask.row]).log_softmax(-1)
        # Without a finite maximum no part of it is a number.
        yield None if row[0].isnan() else _token_logprob(ask, row, describe)


def at_least_float32(logits: Tensor) -> Tensor:
    """The logits in float32 or better."""
    return logits if logits.dtype.itemsize >= torch.float32.itemsize else logits.float()


def top_tokens(values: Tensor, count: int) -> list[tuple[int, float]]:
    """The `top_count` largest of one row and their values, equal ones by id."""
    # numpy: behind a step of the model each operation of torch costs some 10 microseconds.
    row: LogitRow = values.numpy(force=True)
    count = min(count, len(row))
    if count == 0:
        return []
    tokens = _candidates(row, count)
    tokens = tokens[np.argsort(-row[tokens], kind="stable")[:count]]
    return list(zip(tokens.tolist(), row[tokens].tolist(), strict=True))


def _candidates(row: LogitRow, count: int) -> NDArray[np.int64]:
    """Tokens by id among which the `top_count` largest values of a row are, and all that equal the last of these."""
    blocks = len(row) // _BLOCK_TOKENS
    if blocks < 2 * count:
        return np.arange(len(row))
    highest = row[: blocks * _BLOCK_TOKENS].reshape(blocks, _BLOCK_TOKENS).max(1)
    # At least `top_count` values reach this, one in each of as many blocks.
    least = np.partition(highest, blocks - count)[blocks - count]
    read = np.flatnonzero(highest >= least)[:, None] * _BLOCK_TOKENS + np.arange(_BLOCK_TOKENS)
    tokens = np.concatenate((read.ravel(), np.arange(blocks * _BLOCK_TOKENS, len(row))))
    found: NDArray[np.int64] = tokens[row[tokens] >= least]
    return found


def _token_logprob(ask: LogprobQuery, row: Tensor, describe: Callable[[int, float], Logprob]) -> TokenLogprob:
    named = (ask.token, *ask.labels)
    chosen, *labels = (describe(*pair) for pair in zip(named, row[list(named)].tolist(), strict=True))
    return TokenLogprob(chosen, tuple(describe(*pair) for pair in top_tokens(row, ask.top_count)), tuple(labels))
