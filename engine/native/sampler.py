"""Sampling in one native call (engine/kernels/cpu/step/sampling.h), with the tokens of engine/sample/sampler.py."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.cpu.attention.attention import address
from engine.native.step_library import SAMPLING_CONTEXT, SamplingFields, StepLibrary
from engine.sample.logprobs import LogprobQuery, at_least_float32
from engine.sample.sampler import HostReport, LogitReport, SamplingContext, modified_logits, sample_tokens


class NativeSampler:
    """Implements Sampler. A row of logits gets the same token in any batch."""

    def __init__(self, library: StepLibrary) -> None:
        self._library = library

    def sample(self, logits: Tensor, contexts: Sequence[SamplingContext]) -> list[int | None]:
        """As `sample_tokens`; contexts with other filters than the library's are sampled by torch."""
        if all(map(is_native, contexts)):
            return self._sample(logits, contexts)
        native = [
            row
            for row, context in enumerate(contexts)
            if is_native(context) or (context.has_floor_filters and not context.greedy)
        ]
        tokens: list[int | None] = [None] * len(contexts)
        for row in set(range(len(contexts))).difference(native):
            (tokens[row],) = sample_tokens(logits[row : row + 1], [contexts[row]])
        if native:
            modified = torch.stack([modified_logits(at_least_float32(logits[row]), contexts[row]) for row in native])
            for row, token in zip(native, self._sample(modified, [contexts[row] for row in native]), strict=True):
                tokens[row] = token
        return tokens

    def report(self, logits: Tensor, rows: Sequence[int], queries: Sequence[LogprobQuery]) -> LogitReport:
        """See Sampler."""
        return HostReport(self, logits, rows)

    def _sample(self, logits: Tensor, contexts: Sequence[SamplingContext]) -> list[int | None]:
        float_logits = at_least_float32(logits).contiguous()
        call = SamplingCall(len(contexts), float_logits.data_ptr(), float_logits.shape[1])
        call.prepare(contexts)
        self._library.sample(call.fields)
        return call.tokens


class SamplingCall:
    """A call of the library for logits at a fixed address, to be used any number of times.

    fields  for the library, which writes `tokens`; valid as long as this object
    """

    def __init__(self, rows: int, logits: int, vocabulary: int) -> None:
        """`logits` is the address of float32 logits [rows, vocabulary]."""
        self._contexts = array("q", bytes(SAMPLING_CONTEXT.size * rows))
        self._sampled = array("q", bytes(8 * rows))
        contexts, sampled = address(self._contexts), address(self._sampled)
        self.fields = SamplingFields(contexts, rows, logits, vocabulary, sampled, torch.get_num_threads())

    def prepare(self, contexts: Sequence[SamplingContext]) -> None:
        """Set the contexts of the first len(contexts) rows; `is_native` holds for each."""
        self.fields.rows = len(contexts)
        for row, context in enumerate(contexts):
            write_context(self._contexts, row, context)

    @property
    def tokens(self) -> list[int | None]:
        """The sampled tokens; None where a row has no finite maximum."""
        return [None if token < 0 else token for token in self._sampled[: self.fields.rows]]


def is_native(context: SamplingContext) -> bool:
    """Whether the library samples from unmodified logits: no bias, penalties or constraints, and native filters."""
    return not context.modifies_logits and (context.greedy or context.has_floor_filters)


def write_context(table: array[int], index: int, context: SamplingContext, *, length: int = 0, count: int = 0) -> None:
    """Pack entry `index` of a table of SamplingContext (step.h); `length` and `count` are those of a draft loop."""
    params, temperature = context.params, 0.0 if context.greedy else context.params.temperature
    seed, position = context.seed & 2**64 - 1, context.position
    filters = (temperature, params.top_k, params.top_p, params.min_p)
    SAMPLING_CONTEXT.pack_into(table, index * SAMPLING_CONTEXT.size, length, count, seed, position, *filters)
