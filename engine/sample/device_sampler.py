"""The sampler of a device: tokens and log-probabilities of a step with one wait for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sample.device_noise import best_noisy_argmax
from engine.sample.device_sampling import SamplingBatch, sample_batch, sample_rows
from engine.sample.logprobs import SAMPLED, LogprobQuery, at_least_float32
from engine.sample.sampler import HostReport, LogitReport, Sampler, SamplingContext, TorchSampler
from engine.types.events import Logprob, TokenLogprob
from kvcache.staging import StagingBuffer


def sampler_for(device: torch.device) -> Sampler:
    """The sampler of a runner whose logits are on a device."""
    return TorchSampler() if device.type == "cpu" else DeviceSampler(StagingBuffer(device))


class DeviceSampler:
    """Implements Sampler for logits on a device.

    staging  for copies to that device
    """

    def __init__(self, staging: StagingBuffer) -> None:
        self._staging = staging
        # The kernel is compiled before the first request.
        best_noisy_argmax(staging.device)

    def sample(self, logits: Tensor, contexts: Sequence[SamplingContext]) -> list[int | None]:
        """See Sampler."""
        batch = SamplingBatch(contexts, logits.shape[-1])
        return sample_batch(logits, batch, self._staging.upload(list(batch.arrays.values())))

    def report(self, logits: Tensor, rows: Sequence[int], queries: Sequence[LogprobQuery]) -> LogitReport:
        """See Sampler."""
        return DeviceReport(
            self, lambda arrays: (logits, self._staging.upload(arrays)), logits.shape[-1], rows, queries
        )


class DeviceReport:
    """Implements LogitReport; with rows that are sampled on the host, log-probabilities are computed after them.

    compute     by arrays for the device: logits [rows, vocabulary], and copies of the arrays there
    vocabulary  columns of the logits
    """

    def __init__(
        self,
        sampler: DeviceSampler,
        compute: Callable[[Sequence[NDArray[Any]]], tuple[Tensor, Sequence[Tensor]]],
        vocabulary: int,
        rows: Sequence[int],
        queries: Sequence[LogprobQuery],
    ) -> None:
        self._sampler, self._compute, self._vocabulary = sampler, compute, vocabulary
        self._rows, self._queries = rows, queries
        self._top = min(max((query.top_count for query in queries), default=0), vocabulary)
        self._labels = max((len(query.labels) for query in queries), default=0)
        # After `sample` one of both: answers by row, or the logits with rows that are sampled on the host.
        self._answers: dict[int, list[float]] = {}
        self._on_host: HostReport | None = None

    def sample(self, contexts: Sequence[SamplingContext]) -> list[int | None]:
        """See LogitReport."""
        batch = SamplingBatch(contexts, self._vocabulary)
        if batch.host_rows:
            self._on_host = HostReport(self._sampler, self._compute([])[0], self._rows)
            return self._on_host.sample(contexts)
        own = [np.asarray(self._rows, np.int64), *self._query_arrays()]
        logits, copies = self._compute([*own, *batch.arrays.values()])
        rows, queried, tokens, labels, *arrays = copies
        sampled = sample_rows(logits.index_select(0, rows), batch, arrays)
        answers = self._answer(logits.index_select(0, queried), tokens, labels, sampled)
        numbers = torch.cat((sampled.double(), answers.flatten())).tolist()
        width = answers.shape[-1]
        starts = range(len(contexts), len(numbers), width)
        self._answers = {
            query.row: numbers[start : start + width] for query, start in zip(self._queries, starts, strict=True)
        }
        return [None if token < 0 else int(token) for token in numbers[: len(contexts)]]

    def token_logprobs(
        self, queries: Sequence[LogprobQuery], describe: Callable[[int, float], Logprob]
    ) -> Iterator[TokenLogprob | None]:
        """See LogitReport."""
        if self._on_host is not None:
            yield from self._on_host.token_logprobs(queries, describe)
            return
        for query in queries:
            chosen, *others = self._answers[query.row]
            labels, top = others[: len(query.labels)], others[self._labels :]
            pairs = zip(map(int, top[self._top :]), top[: self._top], strict=True)
            # Without a finite maximum every log-probability is NaN.
            yield (
                None
                if np.isnan(chosen)
                else TokenLogprob(
                    describe(query.token, chosen),
                    tuple(describe(*pair) for pair in pairs)[: query.top_count],
                    tuple(describe(*pair) for pair in zip(query.labels, labels, strict=True)),
                )
            )

    def _query_arrays(self) -> tuple[NDArray[Any], ...]:
        """The rows of the queries; the number of the sampled row (-1: none) and the token of each; their labels."""
        numbers = {row: number for number, row in enumerate(self._rows)}
        sampled = [numbers[query.row] if query.token == SAMPLED else -1 for query in self._queries]
        tokens = [max(query.token, 0) for query in self._queries]
        labels = [[*query.labels, *[0] * (self._labels - len(query.labels))] for query in self._queries]
        return (
            np.asarray([query.row for query in self._queries], np.int64),
            np.asarray([sampled, tokens], np.int64),
            np.asarray(labels, np.int64).reshape(len(self._queries), self._labels),
        )

    def _answer(self, logits: Tensor, tokens: Tensor, labels: Tensor, sampled: Tensor) -> Tensor:
        """For each query the log-probabilities of its token and labels, the largest ones, and their tokens."""
        logprobs = at_least_float32(logits).log_softmax(-1)
        number, token = tokens
        if len(sampled):
            drawn = sampled.index_select(0, number.clamp_min(0)).clamp_min(0)
            token = torch.where(number < 0, token, drawn)
        parts = [logprobs.gather(-1, token[:, None]), logprobs.gather(-1, labels)]
        if self._top:
            # A stable sort: ties are ordered by token.
            parts += [part[:, : self._top] for part in logprobs.sort(dim=-1, descending=True, stable=True)]
        return torch.cat([part.double() for part in parts], -1)
