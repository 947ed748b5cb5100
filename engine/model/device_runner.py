"""Packed batches on a device other than the CPU: one upload before a forward, and one wait for its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.cell_kernels import CellKernels
from engine.model.encoder_mask import EncoderMask
from engine.model.runner import BatchInputs, PackedRunner, single_rows
from engine.sample.device_sampler import DeviceReport, DeviceSampler
from engine.sample.device_sampling import SamplingBatch, sample_batch
from engine.sample.logprobs import LogprobQuery
from engine.sample.sampler import LogitReport, SamplingContext
from kvcache.forward import Forward
from kvcache.row_forward import StateRows, batch_positions
from kvcache.staging import StagingBuffer


class DeviceRunner(PackedRunner):
    """A PackedRunner whose inputs, cell tables and sampling parameters reach the device in one copy."""

    def __init__(self, model: Any, *args: Any, **settings: Any) -> None:
        super().__init__(model, *args, **settings)
        self._staging = StagingBuffer(self._device)
        self.sampler = DeviceSampler(self._staging)
        self._vocabulary = int(model.config.get_text_config().vocab_size)

    def run_and_sample(
        self,
        forward: Forward,
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        encoder_masks: Sequence[EncoderMask | None],
        contexts: Sequence[SamplingContext],
    ) -> list[int | None]:
        """See ModelRunner."""
        batch = SamplingBatch(contexts, self._vocabulary)
        inputs, arrays = self._upload(forward, tokens, logit_rows, list(batch.arrays.values()))
        return sample_batch(self._run(forward, inputs, encoder_masks), batch, arrays)

    def run_and_report(
        self,
        forward: Forward,
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        encoder_masks: Sequence[EncoderMask | None],
        sampled_rows: Sequence[int],
        queries: Sequence[LogprobQuery],
    ) -> LogitReport:
        """See ModelRunner."""

        def compute(arrays: Sequence[NDArray[Any]]) -> tuple[Tensor, list[Tensor]]:
            inputs, copies = self._upload(forward, tokens, logit_rows, arrays)
            return self._run(forward, inputs, encoder_masks), copies

        return DeviceReport(self._staging, compute, self._vocabulary, sampled_rows, queries)

    def _inputs(self, forward: Forward, tokens: Sequence[int], logit_rows: Sequence[int]) -> BatchInputs:
        return self._upload(forward, tokens, logit_rows, [])[0]

    def _upload(
        self, forward: Forward, tokens: Sequence[int], logit_rows: Sequence[int], more: Sequence[NDArray[Any]]
    ) -> tuple[BatchInputs, list[Tensor]]:
        """The inputs of the model and `more` arrays on the device; the forward gets its cells there."""
        has_pool = forward.cache.recurrent_states is not None and self._invariant is None
        single = single_rows(forward.spans) if has_pool else {}
        state_rows = [np.asarray([*single], np.int64), *forward.token_state_rows([*single.values()])]
        own = [np.asarray(tokens, np.int64), batch_positions(forward.spans), np.asarray(logit_rows, np.int64)]
        cells = forward.device_arrays()
        tables = self._table_arrays(forward)
        parts = iter(self._staging.upload([*own, *state_rows, *cells, *tables, *more]))
        batch_tokens, positions, rows = islice(parts, len(own))
        states = StateRows(*islice(parts, len(state_rows)))
        forward.set_device_arrays([*islice(parts, len(cells))])
        if tables and isinstance(self._attend, CellKernels):
            self._attend.set_batch_arrays([*islice(parts, len(tables))])
        return BatchInputs(batch_tokens, positions, rows, states if single else None), [*parts]

    def _table_arrays(self, forward: Forward) -> list[NDArray[np.int32]]:
        """The tables of the attention kernels."""
        if not isinstance(self._attend, CellKernels):
            return []
        groups = [(group.spec, forward.segments(group.spec.layers[0])) for group in forward.groups]
        return self._attend.batch_arrays(groups, forward.batch_tokens)
