"""Packed batches on a device other than the CPU: one upload before a forward, and one wait for its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.cell_kernels import CellKernels
from engine.model.hooks import OutputIndices
from engine.run.packed import BatchInputs, PackedRunner, output_arrays, single_rows
from engine.sample.device_sampler import DeviceReport, DeviceSampler
from engine.sample.device_sampling import SamplingBatch, sample_batch
from engine.step.input import StepFeatures, StepInput
from engine.step.output import StepOutput
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

    def supports(self, features: StepFeatures) -> str | None:
        """See ModelRunner."""
        if features.adapters:
            return "adapters are computed on a CPU only"
        return super().supports(features)

    def run(self, step: StepInput) -> StepOutput:
        """See ModelRunner."""
        sampling = step.sampling
        if sampling is None:
            return super().run(step)
        if sampling.queries is None and sampling.rows is None:
            batch = SamplingBatch(sampling.contexts, self._vocabulary)
            inputs, arrays = self._upload(step, list(batch.arrays.values()))
            logits, hidden_states = self._run(step, inputs)
            return StepOutput(tokens=sample_batch(logits, batch, arrays), hidden_states=hidden_states)
        states: Mapping[int, Tensor] = {}

        def compute(arrays: Sequence[NDArray[Any]]) -> tuple[Tensor, list[Tensor]]:
            nonlocal states
            inputs, copies = self._upload(step, arrays)
            logits, states = self._run(step, inputs)
            return logits, copies

        rows = range(len(step.logit_rows)) if sampling.rows is None else sampling.rows
        report = DeviceReport(self._staging, compute, self._vocabulary, rows, sampling.queries or ())
        tokens = report.sample(sampling.contexts)
        return StepOutput(tokens=tokens, report=report, hidden_states=states)

    def _inputs(self, step: StepInput) -> BatchInputs:
        return self._upload(step, [])[0]

    def _upload(self, step: StepInput, more: Sequence[NDArray[Any]]) -> tuple[BatchInputs, list[Tensor]]:
        """The inputs of the model and `more` arrays on the device; the forward gets its cells there."""
        forward = step.forward
        has_pool = forward.cache.recurrent_states is not None and self._invariant is None
        single = single_rows(forward.spans) if has_pool else {}
        state_rows = [np.asarray([*single], np.int64), *forward.token_state_rows([*single.values()])]
        rows = output_arrays(step.logit_rows, None if step.hidden is None else step.hidden.rows)
        batch_arrays = [np.asarray(step.tokens, np.int64), batch_positions(forward.spans)]
        cells = forward.device_arrays()
        tables = self._table_arrays(forward)
        outputs = [np.asarray(numbers, np.int64) for numbers in rows]
        parts = iter(self._staging.upload([*batch_arrays, *outputs, *state_rows, *cells, *tables, *more]))
        batch_tokens, positions = islice(parts, len(batch_arrays))
        output_rows, *places = islice(parts, len(outputs))
        states = StateRows(*islice(parts, len(state_rows)))
        forward.set_device_arrays([*islice(parts, len(cells))])
        if tables and isinstance(self._attend, CellKernels):
            self._attend.set_batch_arrays([*islice(parts, len(tables))])
        hidden = OutputIndices(*places) if places else None
        axes = None if step.positions is None else step.positions.to(self._device)
        inputs = BatchInputs(batch_tokens, positions, output_rows, hidden, states if single else None, axes)
        return inputs, [*parts]

    def _table_arrays(self, forward: Forward) -> list[NDArray[np.int32]]:
        """The tables of the attention kernels."""
        if not isinstance(self._attend, CellKernels):
            return []
        groups = [(group.spec, forward.segments(group.spec.layers[0])) for group in forward.groups]
        return self._attend.batch_arrays(groups, forward.batch_tokens)
