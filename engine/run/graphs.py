"""Decoding steps recorded once and replayed: the kernels of a step without the Python code between them.

A recorded step reads its tokens, positions and cells from tensors that are written before each replay, so it serves any
sequences. There is one for each size of graph_sizes.py; smaller batches are padded. `record_all` records them at the
start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels import row_attention
from engine.kernels.attention_input import AttentionFunction, RowAttentionInput
from engine.kernels.cell_kernels import CellKernels
from engine.model import hooks
from engine.run.device import DeviceRunner
from engine.run.graph_sizes import BATCH_SIZES, all_sizes, batch_size, positions
from engine.run.packed import BatchInputs, recur_rows, single_rows
from engine.run.runner import DraftLoopInput
from engine.sample.device_sampling import sample_numbered, sampling_numbers
from engine.step.input import FINAL_NORM, StepInput, decoder_layers_of
from engine.step.output import StepOutput
from kvcache.cache import Cache
from kvcache.forward import Forward
from kvcache.kv_buffer import store_rows
from kvcache.row_forward import RowForward, StateRows, row_numbers
from kvcache.spec import Span

log = logging.getLogger("cellar.engine")

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
        function()
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
    """A step for batches of up to `size` tokens, and up to `max_positions` positions.

    numbers  int64 [1 + .., size] on the device: tokens, then those of a RowForward; `replay` reads them
    layers   after which hidden states are read, besides FINAL_NORM
    """

    def __init__(
        self, cache: Cache, device: torch.device, size: int, max_positions: int, layers: tuple[int, ...] = ()
    ) -> None:
        self._cache, self.size, self.max_positions, self.layers = cache, size, max_positions, layers
        self.numbers = torch.from_numpy(self.arrange((), ())).to(device)
        self.cells = RowForward(cache, self.numbers[1:], max_positions)
        rows = torch.arange(size, device=device)
        self.inputs = _RecordedInputs(
            self.numbers[0], self.cells.positions, rows, state_rows=self.cells.state_rows, step=self
        )
        self.replay: Replay | None = None

    def arrange(self, spans: Sequence[Span], tokens: Sequence[int]) -> NDArray[np.int64]:
        """The numbers of a batch."""
        padded = np.zeros((1, self.size), np.int64)
        padded[0, : len(tokens)] = tokens
        return np.concatenate([padded, row_numbers(self._cache, spans, self.size)])


@dataclass(frozen=True, slots=True)
class _RecordedInputs(BatchInputs):
    """Inputs that are in the memory of a recorded step; `hidden` is not."""

    step: RecordedStep = field(kw_only=True)

    def first(self, count: int) -> BatchInputs:
        """The inputs of the first rows, of a step that is not recorded."""
        states = self.state_rows
        if states is not None:
            states = StateRows(states.tokens[:count], states.before[:count], states.after[:count])
        tokens, positions, rows = self.tokens[:count], self.positions[:count], self.output_rows[:count]
        return BatchInputs(tokens, positions, rows, self.hidden, states)


class DraftStep(RecordedStep):
    """A recorded step that samples; its replay gives tokens [size].

    sampling    numbers of `sampling_numbers`; `replay` reads them
    vocabulary  only the first `vocabulary` tokens are sampled
    """

    def __init__(self, cache: Cache, device: torch.device, size: int, max_positions: int, vocabulary: int) -> None:
        super().__init__(cache, device, size, max_positions)
        self.sampling = torch.from_numpy(sampling_numbers((), size)).to(device)
        self.vocabulary = vocabulary


class _DraftLoop:
    """The steps of a draft loop; sequences with more tokens to sample come first.

    active       sequences that sample in each step
    first_spans  the spans of the first step
    """

    def __init__(self, inputs: Sequence[DraftLoopInput], spans: Sequence[Span]) -> None:
        self._inputs, self._spans = inputs, spans
        self.active = [sum(loop_input.count > step for loop_input in inputs) for step in range(inputs[0].count)]
        self.first_spans = [
            Span(span.slot, span.start, len(loop_input.tokens)) for loop_input, span in zip(inputs, spans, strict=True)
        ]

    def arrays(self, first: RecordedStep, later: DraftStep) -> list[NDArray[np.int64]]:
        """Numbers, rows of logits and sampling of the first step; numbers and sampling of each other step."""
        tokens = [token for loop_input in self._inputs for token in loop_input.tokens]
        active = self.active[0] if self.active else 0
        last_rows = np.cumsum([span.length for span in self.first_spans])[:active] - 1
        contexts = [loop_input.context for loop_input in self._inputs]
        arrays = [first.arrange(self.first_spans, tokens), last_rows, sampling_numbers(contexts[:active], active)]
        for ahead, active in enumerate(self.active[1:]):
            spans = [Span(span.slot, span.stop + ahead, 1) for span in self.first_spans[:active]]
            arrays += [later.arrange(spans, ()), sampling_numbers(contexts[:active], later.size, ahead + 1)]
        return arrays


class GraphRunner(DeviceRunner):
    """A DeviceRunner that replays recorded steps for batches of decoded and draft tokens.

    Prompts, and models that cannot be recorded, run as before.
    """

    def __init__(self, model: Any, *args: Any, recorder: Recorder, **settings: Any) -> None:
        super().__init__(model, *args, **settings)
        self._recorder = recorder
        self._steps: dict[tuple[int, int, tuple[int, ...]], RecordedStep] = {}
        self._draft_steps: dict[tuple[int, int], DraftStep] = {}
        # Of the recorded steps; logits and hidden states of a step are in the first rows.
        self._cache: Cache | None = None
        self._logits: Tensor | None = None
        self._states: dict[int, Tensor] = {}
        self._is_recordable = self.switch is None
        # Of the first step of a draft loop: `record_all` records no larger one.
        self._most_loop_tokens = BATCH_SIZES[-1]

    def run(self, step: StepInput) -> StepOutput:
        """See ModelRunner. The logits are a copy: the next replay overwrites its own."""
        output = super().run(step)
        return output if step.sampling is not None else replace(output, logits=output.logits.clone())

    def _upload(self, step: StepInput, more: Sequence[NDArray[Any]]) -> tuple[BatchInputs, list[Tensor]]:
        recorded, forward = self._step(step), step.forward
        if recorded is None:
            return super()._upload(step, more)
        places = [] if step.hidden is None else [np.asarray(step.hidden.rows, np.int64)]
        changes = forward.table_changes()
        numbers, *parts = self._staging.upload([recorded.arrange(forward.spans, step.tokens), *changes, *places, *more])
        forward.write_table_changes(parts[: len(changes)])
        recorded.numbers.copy_(numbers)
        rest = parts[len(changes) :]
        if not places:
            return recorded.inputs, rest
        hidden = hooks.OutputIndices(recorded.inputs.output_rows[: forward.batch_tokens], rest[0])
        return replace(recorded.inputs, hidden=hidden), rest[1:]

    def _run(self, step: StepInput, inputs: BatchInputs) -> tuple[Tensor, Mapping[int, Tensor]]:
        if not isinstance(inputs, _RecordedInputs):
            return super()._run(step, inputs)
        count, replay = step.forward.batch_tokens, self._record(inputs.step)
        if replay is None:
            return super()._run(step, inputs.first(count))
        logits = replay()[:count]
        if inputs.hidden is None or step.hidden is None:
            return logits, {}
        rows = inputs.hidden.hidden_states
        return logits, {layer: self._states[layer].index_select(0, rows) for layer in step.hidden.layers}

    def record_all(self, cache: Cache, tokens: int, draft_vocabulary: int = 0) -> Iterator[tuple[int, int]]:
        """Record the steps of up to `tokens` tokens over an empty cache; yields how many of how many are recorded.

        draft_vocabulary  of the draft loops of the model; 0: it has none
        """
        # A prompt compiles its kernels, and the pool of recurrent states gets its tensors from the next token.
        for start, length in ((0, 2), (2, 1)):
            with cache.forward([Span(0, start, length)]) as forward:
                self.run(StepInput(forward, [0] * length, [length - 1]))
        cache.clear(0)
        sizes = [*all_sizes(tokens, cache.capacity)]
        steps = [self._recorded_step(cache, *size) for size in sizes]
        if draft_vocabulary and cache.recurrent_states is None:
            self._most_loop_tokens = sizes[0][0]
            steps += [
                self._draft_step(cache, *size, draft_vocabulary) for size in all_sizes(cache.slots, cache.capacity)
            ]
        for number, step in enumerate(steps, 1):
            if not self._records(cache) or self._record(step) is None:
                return
            yield number, len(steps)

    def _record(self, step: RecordedStep) -> Replay | None:
        """The replay of a step; None: it cannot be recorded."""
        if step.replay is None:
            try:
                step.replay = self._recorder.record(partial(self._compute, step))
            except NotImplementedError as error:
                log.info("steps are not recorded: %s", error)
                self._is_recordable = False
            except RuntimeError as error:
                log.warning("steps are not recorded, and slower: %s", error)
                self._is_recordable = False
        return step.replay

    def _records(self, cache: Cache) -> bool:
        # Row by row, recurrent layers have other bits than together.
        return self._is_recordable and (self._invariant is None or cache.recurrent_states is None)

    def _recorded_step(self, cache: Cache, size: int, max_positions: int, layers: tuple[int, ...] = ()) -> RecordedStep:
        if self._cache is not cache:
            self._cache, self._steps, self._draft_steps = cache, {}, {}
        key = (size, max_positions, layers)
        if key not in self._steps:
            self._steps[key] = RecordedStep(cache, self._device, *key)
        return self._steps[key]

    def _draft_step(self, cache: Cache, size: int, max_positions: int, vocabulary: int) -> DraftStep:
        if (size, max_positions) not in self._draft_steps:
            self._draft_steps[size, max_positions] = DraftStep(cache, self._device, size, max_positions, vocabulary)
        return self._draft_steps[size, max_positions]

    def _compute(self, step: RecordedStep) -> Tensor:
        """The logits [size, vocabulary] of the batch with the written numbers; of a DraftStep the tokens [size]."""
        inputs = (step.inputs.tokens, step.inputs.positions, step.inputs.output_rows)
        backend = _RowBackend(step.cells.copy(), self._cache_layers, self._sharing_layers, self._attend)
        with torch.inference_mode(), hooks.use_backend(backend), self._invariant or nullcontext():
            if isinstance(step, DraftStep):
                return sample_numbered(hooks.forward(self.model, *inputs)[:, : step.vocabulary], step.sampling)
            # One place for all steps: each recording keeps the memory of its result.
            if self.has_hidden_states:
                rows, layers = step.inputs.output_rows, (FINAL_NORM, *step.layers)
                with hooks.capture_hidden_states(self.model, rows, hooks.OutputIndices(rows, rows), layers) as states:
                    logits = hooks.forward(self.model, *inputs)
                for layer in layers:
                    self._states[layer] = _rows_like(self._states.get(layer), states[layer])
                    self._states[layer][: step.size].copy_(states[layer])
            else:
                logits = hooks.forward(self.model, *inputs)
            self._logits = _rows_like(self._logits, logits)
            return self._logits[: step.size].copy_(logits)

    def supports_draft_loop(self, forward: Forward, first_tokens: int = 1) -> bool:
        """See DraftLoopRunner."""
        is_small = max(first_tokens, len(forward.spans)) <= self._most_loop_tokens
        return is_small and self._records(forward.cache) and forward.cache.recurrent_states is None

    def run_draft_loop(self, forward: Forward, inputs: Sequence[DraftLoopInput], vocabulary: int) -> list[list[int]]:
        """See DraftLoopRunner: a replay for each step, one upload before the first and one wait after the last."""
        order = sorted(range(len(inputs)), key=lambda sequence: -inputs[sequence].count)
        loop = _DraftLoop([inputs[sequence] for sequence in order], [forward.spans[sequence] for sequence in order])
        first, later = self._loop_steps(forward, loop, vocabulary)
        arrays, changes = loop.arrays(first, later), forward.table_changes()
        parts = self._staging.upload([*arrays, *changes])
        forward.write_table_changes(parts[len(arrays) :])
        sampled = iter(self._replay_loop(loop, first, later, parts[: len(arrays)]))
        drafts: list[list[int]] = [[] for _ in inputs]
        for active in loop.active:
            for sequence in order[:active]:
                drafts[sequence].append(next(sampled))
        return [[*takewhile(lambda token: token >= 0, draft)] for draft in drafts]

    def _loop_steps(self, forward: Forward, loop: _DraftLoop, vocabulary: int) -> tuple[RecordedStep, DraftStep]:
        """The steps of the first and of all later tokens."""
        cache, max_positions = forward.cache, positions(max(span.stop for span in forward.spans), forward.capacity)
        first = self._recorded_step(cache, batch_size(sum(span.length for span in loop.first_spans)), max_positions)
        return first, self._draft_step(cache, batch_size(max(loop.active, default=1)), max_positions, vocabulary)

    def _replay_loop(
        self, loop: _DraftLoop, first: RecordedStep, later: DraftStep, parts: Sequence[Tensor]
    ) -> list[int]:
        """The sampled tokens of all steps, from the arrays of the loop on the device."""
        numbers, rows, sampling, *others = parts
        first.numbers.copy_(numbers)
        logits = self._replay(first)
        if not loop.active:
            return []
        sampled = [sample_numbered(logits.index_select(0, rows)[:, : later.vocabulary], sampling)]
        for active, numbers, sampling in zip(loop.active[1:], others[::2], others[1::2], strict=True):
            later.numbers.copy_(numbers)
            later.numbers[0, :active].copy_(sampled[-1][:active].clamp_min(0))
            later.sampling.copy_(sampling)
            sampled.append(self._replay(later)[:active].clone())
        return torch.cat(sampled).tolist()

    def _replay(self, step: RecordedStep) -> Tensor:
        replay = self._record(step)
        if replay is None:
            raise RuntimeError("the steps of a draft loop cannot be recorded")
        return replay()

    def _step(self, step: StepInput) -> RecordedStep | None:
        """The recorded step for a batch; None for one to run as before."""
        forward, count = step.forward, step.forward.batch_tokens
        if not self._records(forward.cache) or type(forward) is not Forward:
            return None
        if len(step.logit_rows) != count or count > BATCH_SIZES[-1]:
            return None
        # A recorded step reads embeddings and token indices.
        if step.features.bidirectional or step.embeddings or step.positions is not None:
            return None
        # A token reads the state that the one before it wrote.
        if forward.cache.recurrent_states is not None and len(single_rows(forward.spans)) < len(forward.spans):
            return None
        longest = max(span.stop for span in forward.spans)
        layers = decoder_layers_of(step.features.hidden_layers)
        return self._recorded_step(forward.cache, batch_size(count), positions(longest, forward.capacity), layers)


def _rows_like(memory: Tensor | None, rows: Tensor) -> Tensor:
    """Memory for rows of the largest recorded batch."""
    return rows.new_empty(BATCH_SIZES[-1], rows.shape[-1]) if memory is None else memory


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
            return self._attend_latent_rows(RowAttentionInput(call.query, keys, values, cells, call.scale), call.latent)
        return self._attend_rows(
            RowAttentionInput(call.query, keys, values, cells, call.scale, call.softcap, call.sinks)
        )

    def recur(self, name: Hashable, operation: hooks.RecurrentOperation) -> list[Tensor]:
        """See AttentionBackend."""
        assert self._forward.state_rows is not None, "a cache without recurrent states"
        return [*torch.split(recur_rows(self._forward, name, operation, self._forward.state_rows), 1)]
