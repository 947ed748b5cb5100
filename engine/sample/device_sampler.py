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
from engine.sample.sampler import LogitReport, Sampler, SamplingContext, TorchSampler
from engine.types.events import Logprob, TokenLogprob
from kvcache.staging import StagingBuffer


def sampler_for(device: torch.device) -> Sampler:
    """The sampler of a runner with logits on a device."""
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
        batch = SamplingBatch(contexts, logits.shape[-1])
        return sample_batch(logits, batch, self._staging.upload(list(batch.arrays.values())))

    def report(self, logits: Tensor, rows: Sequence[int], queries: Sequence[LogprobQuery]) -> LogitReport:
        return DeviceReport(
            self._staging, lambda arrays: (logits, self._staging.upload(arrays)), logits.shape[-1], rows, queries
        )


class DeviceReport:
    """Implements LogitReport; with rows that are sampled on the host, log-probabilities take another upload and wait.

    staging     for copies to the device
    compute     by arrays for the device: logits [rows, vocabulary], and copies of the arrays there
    vocabulary  columns of the logits
    """

    def __init__(
        self,
        staging: StagingBuffer,
        compute: Callable[[Sequence[NDArray[Any]]], tuple[Tensor, Sequence[Tensor]]],
        vocabulary: int,
        rows: Sequence[int],
        queries: Sequence[LogprobQuery],
    ) -> None:
        self._staging, self._compute, self._vocabulary = staging, compute, vocabulary
        self._rows, self._queries = rows, queries
        self._top = min(max((query.top_count for query in queries), default=0), vocabulary)
        self._labels = max((len(query.labels) for query in queries), default=0)
        # By row, after `sample`.
        self._answers: dict[int, list[float]] = {}

    def sample(self, contexts: Sequence[SamplingContext]) -> list[int | None]:
        batch, rows = SamplingBatch(contexts, self._vocabulary), np.asarray(self._rows, np.int64)
        if batch.host_rows:
            logits, (device_rows, *arrays) = self._compute([rows, *batch.arrays.values()])
            tokens = sample_batch(logits.index_select(0, device_rows), batch, arrays)
            if self._queries:
                uploaded = self._staging.upload(self._query_arrays(tokens))
                self._keep(self._answer(logits, *uploaded).flatten().tolist())
            return tokens
        queries = self._query_arrays(())
        logits, (device_rows, *copies) = self._compute([rows, *queries, *batch.arrays.values()])
        sampled = sample_rows(logits.index_select(0, device_rows), batch, copies[len(queries) :])
        answers = self._answer(logits, *copies[: len(queries)], sampled=sampled)
        numbers = torch.cat((sampled.double(), answers.flatten())).tolist()
        self._keep(numbers[len(contexts) :])
        return [None if token < 0 else int(token) for token in numbers[: len(contexts)]]

    def token_logprobs(
        self, queries: Sequence[LogprobQuery], describe: Callable[[int, float], Logprob]
    ) -> Iterator[TokenLogprob | None]:
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

    def _query_arrays(self, tokens: Sequence[int | None]) -> tuple[NDArray[Any], ...]:
        """The rows of the queries; the number of the sampled row (-1: none) and the token of each; their labels.

        tokens  of the sampled rows; empty: not known yet
        """
        numbers = {row: number for number, row in enumerate(self._rows)}
        sampled_or_token = [
            (numbers[query.row], 0) if query.token == SAMPLED else (-1, query.token) for query in self._queries
        ]
        if tokens:
            sampled_or_token = [
                (-1, token if number < 0 else tokens[number] or 0) for number, token in sampled_or_token
            ]
        labels = [[*query.labels, *[0] * (self._labels - len(query.labels))] for query in self._queries]
        return (
            np.asarray([query.row for query in self._queries], np.int64),
            np.asarray(sampled_or_token, np.int64).reshape(-1, 2).T,
            np.asarray(labels, np.int64).reshape(len(self._queries), self._labels),
        )

    def _answer(
        self, logits: Tensor, rows: Tensor, tokens: Tensor, labels: Tensor, *, sampled: Tensor | None = None
    ) -> Tensor:
        """For each query the log-probabilities of its token and labels, the largest ones, and their tokens."""
        logprobs = at_least_float32(logits.index_select(0, rows)).log_softmax(-1)
        number, token = tokens
        if sampled is not None and len(sampled):
            drawn = sampled.index_select(0, number.clamp_min(0)).clamp_min(0)
            token = torch.where(number < 0, token, drawn)
        parts = [logprobs.gather(-1, token[:, None]), logprobs.gather(-1, labels)]
        if self._top:
            # A stable sort: ties are ordered by token.
            parts += [part[:, : self._top] for part in logprobs.sort(dim=-1, descending=True, stable=True)]
        return torch.cat([part.double() for part in parts], -1)

    def _keep(self, answers: Sequence[float]) -> None:
        """Set the answers from the numbers of all queries, one after the other."""
        width = 1 + self._labels + 2 * self._top
        self._answers = {
            query.row: [*answers[index * width : (index + 1) * width]] for index, query in enumerate(self._queries)
        }
