"""Decoding steps recorded once and replayed: the kernels of a step without the Python code between them.

A recorded step reads its tokens, positions and cells from tensors that are written before each replay, so it serves any
sequences. There is one for each size of batch (BATCH_SIZES, the rest is padding) and each power of two of positions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels import row_attention
from engine.kernels.cell_kernels import CellKernels
from engine.kernels.reference import AttentionFunction
from engine.model import hooks
from engine.model.device_runner import DeviceRunner
from engine.model.encoder_mask import EncoderMask
from engine.model.runner import BatchInputs
from kvcache.attention_group import AttentionGroup
from kvcache.forward import Forward
from kvcache.kv_buffer import store_rows
from kvcache.row_forward import RowForward

log = logging.getLogger("cellar.engine")

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
# Positions of the shortest recorded steps.
_MIN_POSITIONS = 512

# Computes the logits of a step anew.
Replay: TypeAlias = Callable[[], Tensor]


class Recorder(Protocol):
    """Records the operations of a function on a device."""

    def record(self, function: Callable[[], Tensor]) -> Replay:
        """Repeats the operations, on the same memory. RuntimeError for a function that cannot be recorded."""
        ...


class CallRecorder:
    """A Recorder that calls the function again: for devices without graphs, and for tests."""

    def record(self, function: Callable[[], Tensor]) -> Replay:
        """See Recorder."""
        return function


class CudaRecorder:
    """A Recorder of CUDA graphs in one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, function: Callable[[], Tensor]) -> Replay:
        """See Recorder."""
        # Kernels are compiled, and libraries take their memory, before the recording.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = function()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def recorder_for(device: torch.device) -> Recorder | None:
    """The recorder of a device; None: it has none."""
    return CudaRecorder() if device.type == "cuda" else None


class RecordedStep:
    """A step for batches of up to `size` tokens, and up to `most` positions.

    numbers  int64 [1 + .., size] on the device: tokens, then those of a RowForward; `replay` reads them
    """

    def __init__(self, forward: Forward, device: torch.device, size: int, most: int) -> None:
        self.size, self.most = size, most
        self.numbers = torch.zeros(self.arrange(forward, ()).shape, dtype=torch.long, device=device)
        self.cells = forward.row_forward(self.numbers[1:], most)
        rows = torch.arange(size, device=device)
        self.inputs = _RecordedInputs(self.numbers[0], self.cells.positions, rows, None, self)
        self.replay: Replay | None = None

    def arrange(self, forward: Forward, tokens: Sequence[int]) -> NDArray[np.int64]:
        """The numbers of a batch."""
        padded = np.zeros((1, self.size), np.int64)
        padded[0, : len(tokens)] = tokens
        return np.concatenate([padded, forward.row_numbers(self.size)])


@dataclass(frozen=True, slots=True)
class _RecordedInputs(BatchInputs):
    """Inputs that are in the memory of a recorded step."""

    step: RecordedStep


class GraphRunner(DeviceRunner):
    """A DeviceRunner that replays recorded steps for batches of decoded and draft tokens.

    Prompts, and models that cannot be recorded, run as before.
    """

    def __init__(self, model: Any, *args: Any, recorder: Recorder, **settings: Any) -> None:
        super().__init__(model, *args, **settings)
        self._recorder = recorder
        self._steps: dict[tuple[int, int], RecordedStep] = {}
        # The cache of the recorded steps.
        self._groups: tuple[AttentionGroup, ...] = ()
        self._is_recordable = self.switch is None

    def run(
        self,
        forward: Forward,
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        encoder_masks: Sequence[EncoderMask | None] = (),
    ) -> Tensor:
        """See ModelRunner. The logits are a copy: the next replay overwrites its own."""
        return super().run(forward, tokens, logit_rows, encoder_masks).clone()

    def _upload(
        self, forward: Forward, tokens: Sequence[int], logit_rows: Sequence[int], more: Sequence[NDArray[Any]]
    ) -> tuple[BatchInputs, list[Tensor]]:
        step = self._step(forward, logit_rows)
        if step is None:
            return super()._upload(forward, tokens, logit_rows, more)
        cells = forward.device_arrays()
        numbers, *parts = self._staging.upload([step.arrange(forward, tokens), *cells, *more])
        forward.set_device_arrays(parts[: len(cells)])
        step.numbers.copy_(numbers)
        return step.inputs, parts[len(cells) :]

    def _run(self, forward: Forward, inputs: BatchInputs, encoder_masks: Sequence[EncoderMask | None]) -> Tensor:
        if not isinstance(inputs, _RecordedInputs):
            return super()._run(forward, inputs, encoder_masks)
        step, count = inputs.step, forward.batch_tokens
        try:
            if step.replay is None:
                step.replay = self._recorder.record(lambda: self._compute(step))
            return step.replay()[:count]
        except NotImplementedError as error:
            log.info("steps are not recorded: %s", error)
        except RuntimeError as error:
            if step.replay is not None:
                raise
            log.warning("steps are not recorded, and slower: %s", error)
        self._is_recordable = False
        own = step.inputs
        unpadded = BatchInputs(own.tokens[:count], own.positions[:count], own.logit_rows[:count], None)
        return super()._run(forward, unpadded, encoder_masks)

    def _compute(self, step: RecordedStep) -> Tensor:
        """The logits [size, vocabulary] of the batch whose numbers are written."""
        inputs = (step.inputs.tokens, step.inputs.positions, step.inputs.logit_rows)
        backend = _RowBackend(step.cells.copy(), self._cache_layers, self._sharing_layers, self._attend)
        with torch.inference_mode(), hooks.use_backend(backend):
            return hooks.forward(self.model, *inputs)

    def run_with_hidden_states(
        self,
        forward: Forward,
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        hidden_rows: Sequence[int],
        encoder_masks: Sequence[EncoderMask | None] = (),
    ) -> tuple[Tensor, Tensor]:
        """See ModelRunner; never recorded, because a replay calls no hook of the model."""
        recordable, self._is_recordable = self._is_recordable, False
        try:
            return super().run_with_hidden_states(forward, tokens, logit_rows, hidden_rows, encoder_masks)
        finally:
            self._is_recordable = recordable

    def _step(self, forward: Forward, logit_rows: Sequence[int]) -> RecordedStep | None:
        """The recorded step for a batch; None for one to run as before."""
        count = forward.batch_tokens
        # A replay calls no hook.
        is_watched = bool(getattr(self.model.get_decoder(), "_forward_hooks", None))
        if not self._is_recordable or is_watched or self._invariant is not None or type(forward) is not Forward:
            return None
        if len(logit_rows) != count or count > BATCH_SIZES[-1] or any(span.bidirectional for span in forward.spans):
            return None
        if self._groups is not forward.groups:
            self._groups, self._steps = forward.groups, {}
        size = next(size for size in BATCH_SIZES if size >= count)
        longest = max(span.stop for span in forward.spans)
        most = min(max(1 << (longest - 1).bit_length(), _MIN_POSITIONS), forward.capacity)
        if (size, most) not in self._steps:
            self._steps[size, most] = RecordedStep(forward, self._device, size, most)
        return self._steps[size, most]


class _RowBackend:
    """The AttentionBackend of a recorded step."""

    def __init__(
        self,
        forward: RowForward,
        cache_layers: Mapping[int, int],
        sharing_layers: Container[int],
        attend: AttentionFunction,
    ) -> None:
        self._forward, self._cache_layers, self._sharing_layers = forward, cache_layers, sharing_layers
        kernels = attend if isinstance(attend, CellKernels) else None
        self._store = store_rows if kernels is None else kernels.store
        self._attend_rows = row_attention.attend_rows if kernels is None else kernels.attend_rows
        self._attend_latent_rows = row_attention.attend_latent_rows if kernels is None else kernels.attend_latent_rows

    def attend(self, call: hooks.AttentionCall) -> Tensor:
        """See AttentionBackend. NotImplementedError for cross attention and for a bias by distance."""
        if call.is_cross or call.bias is not None:
            raise NotImplementedError("recorded steps have neither cross attention nor a bias by distance")
        layer = self._cache_layers[call.layer]
        if call.layer not in self._sharing_layers:
            self._forward.store_kv(layer, call.key, call.value, self._store)
        (keys, values), cells = self._forward.layer_kv(layer), self._forward.row_cells(layer)
        if call.latent is not None:
            return self._attend_latent_rows(call.query, keys, cells, call.latent, scale=call.scale)
        return self._attend_rows(
            call.query, keys, values, cells, scale=call.scale, softcap=call.softcap, sinks=call.sinks
        )

    def recur(self, name: Hashable, operation: hooks.RecurrentOperation) -> list[Tensor]:
        """Raises NotImplementedError."""
        raise NotImplementedError("recorded steps have no recurrent layers")
