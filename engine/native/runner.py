"""Runs a decoder over the spans of a forward in one native call."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu.attention.attention import (
    ATTENTION_RANGES,
    FORMATS,
    KernelBuffer,
    address,
    kv_buffer_fields,
    segment_table,
    write_segments,
)
from engine.kernels.products import RowInvariantProduct
from engine.model import hooks
from engine.native.adapters import NativeAdapters
from engine.native.attention import rotary_angles, switched_rotary_angles
from engine.native.content_rows import FEATURE_ARGUMENTS, AddedFeatures, ContentRows
from engine.native.decoder import CachedSpec, DecoderSpec, RecurrenceSpec, RotarySpec
from engine.native.description import (
    describe_embedding,
    describe_layers,
    describe_linear,
    describe_norm,
    describe_pair_input,
    describe_per_layer_inputs,
    describe_rotary,
    recurrence_fields,
)
from engine.native.draft_loop import context_table, describe_draft_loop
from engine.native.query_scale import query_factors
from engine.native.recurrent_states import RecurrentStates
from engine.native.rotary_axes import angles_by_axis, pair_axes
from engine.native.sampler import NativeSampler, SamplingCall, is_native
from engine.native.step_library import CellGroupFields, LayerFields, RotaryFields, StepFields, StepLibrary
from engine.native.trace import LinearModule
from engine.run.packed import PackedRunner
from engine.run.runner import DraftLoopInput, LocalRunner
from engine.step.input import (
    FINAL_NORM,
    HiddenRows,
    Sampling,
    StepFeatures,
    StepInput,
    decoder_layers_of,
    differ_by_axis,
)
from engine.step.output import StepOutput, sampled_output
from kvcache.attention_group import AttentionGroup
from kvcache.forward import Forward
from kvcache.kv_buffer import LayerKV
from kvcache.row_forward import batch_positions


@dataclass(frozen=True, slots=True)
class _OutputBuffers:
    """Memory for the output of a step: logits [rows, vocabulary], hidden states [rows or more, width].

    hidden        None: no hidden states are returned
    layer_states  [layers, hidden rows, width] after the decoder layers of `hidden`, in order
    """

    rows: int
    logits: Tensor
    hidden_states: Tensor
    logits_address: int
    hidden_states_address: int
    hidden: HiddenRows | None = None
    layer_states: Tensor = torch.empty(0)

    @classmethod
    def allocate(cls, rows: int, vocabulary: int, width: int) -> _OutputBuffers:
        """Buffers for `rows` rows with logits, without hidden states of other rows."""
        logits, hidden_states = torch.empty(rows, vocabulary), torch.empty(rows, width)
        return cls(rows, logits, hidden_states, logits.data_ptr(), hidden_states.data_ptr())

    def with_states(self, logit_rows: int, hidden: HiddenRows | None) -> _OutputBuffers:
        """The same logits with new memory for hidden states; a step computes the first `logit_rows` logits."""
        if hidden is None:
            return self
        count, width = len(hidden.rows), self.hidden_states.shape[1]
        states = torch.empty(logit_rows + count, width)
        layer_states = torch.empty(len(decoder_layers_of(hidden.layers)), count, width)
        return replace(
            self,
            hidden_states=states,
            hidden_states_address=states.data_ptr(),
            hidden=hidden,
            layer_states=layer_states,
        )

    def states(self, logit_rows: int) -> dict[int, Tensor]:
        """The hidden states by layer, after a step with `logit_rows` rows of logits."""
        if self.hidden is None:
            return {}
        states = dict(zip(decoder_layers_of(self.hidden.layers), self.layer_states, strict=True))
        return states | {FINAL_NORM: self.hidden_states[logit_rows:]}


class NativeRunner(LocalRunner):
    """Runs forwards in the native step. Belongs to the engine thread."""

    def __init__(
        self,
        packed: PackedRunner,
        decoder: DecoderSpec,
        library: StepLibrary,
        *,
        rounds_to_bfloat16: bool = True,
        long_decoder: DecoderSpec | None = None,
    ) -> None:
        """Raises UnsupportedArchitecture for a matrix in a dtype or memory layout that the step does not read.

        packed              the packed runner of the same model, with the layers of the cache
        rounds_to_bfloat16  whether rows may be rounded for products with bfloat16 weights, keys and values, where the
                            processor is faster so
        long_decoder        the decoder with the rotary factors beyond the original length, if they change
        """
        self.layers, self.switch = packed.layers, packed.switch
        self.long_factor_layers = packed.long_factor_layers
        self.sampler: NativeSampler = NativeSampler(library)
        self._decoder, self._library = decoder, library
        self._contents = ContentRows(packed.model, decoder)
        count = len(decoder.layers)
        self._named_layers = range(count if len(hooks.decoder_layers(packed.model)) == count else 0)
        rotaries = _rotaries(decoder)
        self._rotaries = tuple(dict.fromkeys(rotaries))
        self._pair_axes = [pair_axes(packed.model, rotary) for rotary in self._rotaries]
        self._long_rotaries = {} if long_decoder is None else dict(zip(rotaries, _rotaries(long_decoder), strict=True))
        layers = describe_layers(decoder, self._rotaries)
        self._fields = (LayerFields * len(layers))(*layers)
        # Layers with their layer of the cache, and layers with recurrent states.
        pairs = list(zip(decoder.mixers, self._fields, strict=True))
        self._cached = [(mixer.cells, layer_fields) for mixer, layer_fields in pairs if isinstance(mixer, CachedSpec)]
        self._recurrent = [
            (mixer, recurrence_fields(mixer, layer_fields))
            for mixer, layer_fields in pairs
            if isinstance(mixer, RecurrenceSpec)
        ]
        self.adapters: NativeAdapters | None = None
        self._head = describe_linear(decoder.output_head.head)
        self._step = self._describe_step(decoder, rounds_to_bfloat16)
        # Of the cache of the last forward: its groups, the first layer of each, and the rotary tables. These take less
        # than 1 % of the memory of as many cells.
        self._bound: tuple[AttentionGroup, ...] | None = None
        self._group_layers: list[int] = []
        self._cell_groups = (CellGroupFields * 0)()
        self._angles: list[tuple[Tensor, Tensor]] = []
        self._query_factors: list[Tensor | None] = []
        self._rotary_tables = (RotaryFields * 0)()
        self._rotary_rows = array("q")
        # Angles of the last step with positions that differ by axis.
        self._axis_angles: list[tuple[Tensor, Tensor]] = []
        # Segment tables by group, of steps with `_spans` spans.
        self._spans = 0
        self._tables: list[array[int]] = []
        # Logits of sampled steps, and the sampling call that reads them.
        self._buffers = self._allocate(0)
        self._sampling = self._sampling_call(self._buffers)

    def supports(self, features: StepFeatures) -> str | None:
        """See ModelRunner."""
        if features.encoder or features.bidirectional:
            return "the native step attends to earlier tokens only"
        if features.adapters and self.adapters is None:
            return "the native step has no adapters"
        if features.contents and self._contents.reason is not None:
            return self._contents.reason
        if not features.content_arguments <= (FEATURE_ARGUMENTS if self._named_layers else frozenset()):
            return "the native step has no such arguments of contents"
        if features.position_axes and not self._has_position_axes:
            return "the native step has one position for each token"
        if features.far_positions:
            return "the native step has rotary tables up to the capacity"
        missing = [layer for layer in decoder_layers_of(features.hidden_layers) if layer not in self._named_layers]
        return f"the native step has no layer {missing[0]}" if missing else None

    def add_adapters(self, modules: Mapping[str, LinearModule]) -> NativeAdapters:
        """Compute adapters from now on, of the model's linear layers by name."""
        self.adapters = NativeAdapters(self._fields, modules)
        return self.adapters

    def run(self, step: StepInput) -> StepOutput:
        """See ModelRunner."""
        sampling, logit_count = step.sampling, len(step.logit_rows)
        if sampling is not None and sampling.queries is None and all(map(is_native, sampling.contexts)):
            return self._run_and_sample(step, sampling)
        output = self._allocate(logit_count).with_states(logit_count, step.hidden)
        self._run_step(step, output)
        return sampled_output(step, self.sampler, self._scale_and_cap(output.logits), output.states(logit_count))

    def _run_and_sample(self, step: StepInput, sampling: Sampling) -> StepOutput:
        """A step with logits in memory that is kept.

        No torch operation follows the step: caches are cold after it, and the first operation takes 60 microseconds.
        """
        logit_count = len(step.logit_rows)
        if self._buffers.rows < logit_count:
            # Kept from step to step: new memory has a page fault for each page during the step.
            rows = 1 << (logit_count - 1).bit_length()
            self._buffers = self._allocate(rows)
            self._sampling = self._sampling_call(self._buffers)
        buffers = self._buffers.with_states(logit_count, step.hidden)
        # Before the step, because caches are cold after it.
        self._sampling.prepare(sampling.contexts)
        self._run_step(step, buffers)
        if not self._decoder.output_head.is_linear:
            self._scale_and_cap(self._buffers.logits[:logit_count])
        self._library.sample(self._sampling.fields)
        return StepOutput(tokens=self._sampling.tokens, hidden_states=buffers.states(logit_count))

    def make_invariant(self, product: RowInvariantProduct) -> None:
        """The native step is row-invariant."""

    def supports_draft_loop(self, forward: Forward, first_tokens: int = 1) -> bool:
        """See DraftLoopRunner. Recurrent states could not be rewound to rejected drafts."""
        return not self._recurrent

    def run_draft_loop(self, forward: Forward, inputs: Sequence[DraftLoopInput], vocabulary: int) -> list[list[int]]:
        """See DraftLoopRunner."""
        assert self.supports_draft_loop(forward), "not checked by the caller"
        max_count = max(draft_input.count for draft_input in inputs)
        sampled = array("q", bytes(8 * len(inputs) * max_count))
        tokens = array("q", [token for draft_input in inputs for token in draft_input.tokens])
        contexts, step = context_table(inputs), StepFields.from_buffer_copy(self._describe(forward))
        # Logits of other tokens are not computed.
        step.head.outputs = min(step.head.outputs, vocabulary)
        self._library.run_draft_loop(describe_draft_loop(self._decoder, step, contexts, tokens, sampled))
        rows = [sampled[index * max_count : (index + 1) * max_count] for index in range(len(inputs))]
        return [[token for token in row if token >= 0] for row in rows]

    def _describe_step(self, decoder: DecoderSpec, rounds_to_bfloat16: bool) -> StepFields:
        """The fields that are the same in all steps."""
        inputs, pair_input = decoder.per_layer_inputs, decoder.pair_input
        return StepFields(
            width=decoder.width,
            embedding=describe_embedding(decoder),
            per_layer_inputs=None if inputs is None else ctypes.pointer(describe_per_layer_inputs(inputs)),
            pair_input=None if pair_input is None else ctypes.pointer(describe_pair_input(pair_input)),
            layers=self._fields,
            layer_count=len(self._fields),
            final_norm=describe_norm(decoder.output_head.norm),
            head=self._head,
            rounds_to_bfloat16=rounds_to_bfloat16,
        )

    def _allocate(self, rows: int) -> _OutputBuffers:
        return _OutputBuffers.allocate(rows, self._head.outputs, self._step.width)

    def _sampling_call(self, output: _OutputBuffers) -> SamplingCall:
        return SamplingCall(output.rows, output.logits_address, self._head.outputs)

    def _run_step(self, step: StepInput, output: _OutputBuffers) -> None:
        """Compute the logits of `logit_rows`, and the hidden states of these rows and after them of `hidden`."""
        # The arrays must live until the step is over, which reads them by address.
        hidden = step.hidden or HiddenRows((), ())
        output_rows = array("q", (*step.logit_rows, *hidden.rows))
        tokens, inputs = self._token_inputs(step)
        layers = array("q", decoder_layers_of(hidden.layers))
        fields = self._describe(step.forward, step.positions)
        fields.tokens, fields.output_rows = address(tokens), address(output_rows)
        fields.output_count, fields.logit_count = len(output_rows), len(step.logit_rows)
        fields.hidden_states, fields.logits = output.hidden_states_address, output.logits_address
        fields.state_layers, fields.state_layer_count = address(layers), len(layers)
        fields.layer_states = output.layer_states.data_ptr()
        added = AddedFeatures.of(len(tokens), step.embeddings) if step.embeddings else None
        if added is not None:
            fields.features, fields.feature_rows = added.features.data_ptr(), address(added.rows)
            fields.feature_layers, fields.feature_count = added.features.shape[:2]
        if inputs is not None:
            fields.initial_states = inputs.data_ptr()
        if self.adapters is not None:
            self.adapters.describe(step.forward.spans, step.adapters, fields)
        states = self._bind_states(step.forward, fields) if self._recurrent else None
        try:
            self._library.run_step(fields)
        finally:
            if inputs is not None:
                fields.initial_states = None
        if states is not None:
            states.commit()

    def _token_inputs(self, step: StepInput) -> tuple[array[int], Tensor | None]:
        """The tokens; in a step with contents, also the inputs of the first layer."""
        if step.embeddings:
            return self._contents.inputs(step.tokens, step.embeddings)
        return array("q", step.tokens), None

    def _bind_states(self, forward: Forward, step: StepFields) -> RecurrentStates:
        """Set the addresses of the recurrent states of a forward."""
        states = RecurrentStates(forward)
        for recurrence, fields in self._recurrent:
            states.bind(recurrence, fields)
        step.state_ranges, step.state_range_count = states.fields, len(states.fields)
        return states

    def _scale_and_cap(self, logits: Tensor) -> Tensor:
        """Logits from the outputs of the head, in place."""
        scale, cap = self._decoder.output_head.scale, self._decoder.output_head.softcap
        scaled = logits if scale == 1.0 else logits.mul_(scale)
        return scaled if cap == 0.0 else scaled.div_(cap).tanh_().mul_(cap)

    def _describe(self, forward: Forward, positions: Tensor | None = None) -> StepFields:
        """The step of a supported forward, but for its tokens and outputs; `positions` of StepInput."""
        # The KV buffers of a cache never move.
        if forward.groups is not self._bound:
            self._bind_cache(forward)
        if len(forward.spans) != self._spans:
            self._allocate_tables(forward)
        for layer, table in zip(self._group_layers, self._tables, strict=True):
            write_segments(table, forward.segments(layer))
        step = self._step
        if positions is None or not differ_by_axis(positions):
            step.rotaries, step.rotary_rows = self._rotary_tables, self._write_rotary_rows(forward, positions)
        else:
            step.rotaries, step.rotary_rows = self._write_axis_angles(positions)
        step.rows, step.threads = forward.batch_tokens, torch.get_num_threads()
        step.state_layer_count = step.adapter_range_count = step.feature_layers = 0
        return step

    def _allocate_tables(self, forward: Forward) -> None:
        """Segment tables for the span count of a forward."""
        self._spans = len(forward.spans)
        self._tables = [segment_table(forward.segments(layer)) for layer in self._group_layers]
        for group, table in zip(self._cell_groups, self._tables, strict=True):
            group.segments, group.count = address(table), self._spans

    def _bind_cache(self, forward: Forward) -> None:
        """Set the KV buffers and cell groups of all layers, and compute the rotary tables."""
        groups: dict[int, int] = {}
        self._group_layers = []
        for layer, fields in self._cached:
            self._bind_layer(forward, layer, fields)
            segments = id(forward.segments(layer))
            if segments not in groups:
                groups[segments] = len(groups)
                self._group_layers.append(layer)
            fields.cell_group = groups[segments]
        cell_groups = [_cell_group(forward, layer) for layer in self._group_layers]
        self._cell_groups = (CellGroupFields * len(cell_groups))(*cell_groups)
        self._spans = 0
        self._step.cell_groups, self._step.cell_group_count = self._cell_groups, len(cell_groups)
        positions = torch.arange(forward.capacity)
        self._angles = [self._angles_of(rotary, positions) for rotary in self._rotaries]
        self._query_factors = [self._query_factors_of(rotary, positions) for rotary in self._rotaries]
        tables = map(describe_rotary, self._rotaries, self._angles, self._query_factors)
        self._rotary_tables = (RotaryFields * len(self._rotaries))(*tables)
        self._bound = forward.groups

    def _angles_of(self, rotary: RotarySpec, positions: Tensor) -> tuple[Tensor, Tensor]:
        long_rotary = self._long_rotaries.get(rotary)
        if self.switch is None or long_rotary is None:
            return rotary_angles(rotary, positions)
        return switched_rotary_angles(rotary, long_rotary, positions, self.switch.original_length)

    def _query_factors_of(self, rotary: RotarySpec, positions: Tensor) -> Tensor | None:
        long_rotary = self._long_rotaries.get(rotary)
        scale = (long_rotary or rotary).query_scale
        if scale is None:
            return None
        return query_factors(scale, positions).repeat(1 if long_rotary is None else 2)

    @property
    def _has_position_axes(self) -> bool:
        """Whether the positions of a token may differ by axis."""
        is_scaled = any(rotary.query_scale is not None for rotary in self._rotaries)
        return self.switch is None and not is_scaled and all(axes is not None for axes in self._pair_axes)

    def _write_axis_angles(self, positions: Tensor) -> tuple[ctypes.Array[RotaryFields], int]:
        """Rotary tables with a row for each batch token, and the address of the rows."""
        self._axis_angles = [
            angles_by_axis(angles, axes, positions)
            for angles, axes in zip(self._angles, self._pair_axes, strict=True)
            if axes is not None
        ]
        tables = [
            describe_rotary(rotary, angles, None)
            for rotary, angles in zip(self._rotaries, self._axis_angles, strict=True)
        ]
        self._rotary_rows = array("q", range(positions.shape[1]))
        return (RotaryFields * len(tables))(*tables), address(self._rotary_rows)

    def _write_rotary_rows(self, forward: Forward, positions: Tensor | None) -> int | None:
        """The address of the rows of the batch tokens in the rotary tables; None: their indices in their sequences."""
        has_long_factors = self.switch is not None and any([span.long_factors for span in forward.spans])
        if positions is None and not has_long_factors:
            return None
        rows = batch_positions(forward.spans) if positions is None else positions[-1].numpy()
        tables = [forward.capacity * span.long_factors for span in forward.spans]
        rows = rows + np.repeat(tables, [span.length for span in forward.spans])
        self._rotary_rows = array("q", rows.tobytes())
        return address(self._rotary_rows)

    def _bind_layer(self, forward: Forward, layer: int, fields: LayerFields) -> None:
        """Set the KV buffers of a layer to layer `layer` of the cache."""
        keys, values = map(_kernel_buffer, forward.layer_kv(layer))
        attention_range = forward.attention_range(layer)
        if fields.latents:
            values = keys.first(fields.values.width)
        fields.key_buffer, fields.value_buffer = kv_buffer_fields(keys), kv_buffer_fields(values)
        fields.attention_range = ATTENTION_RANGES[attention_range.kind]
        fields.attention_range_size = attention_range.size
        self._step.format = FORMATS[keys.numbers.dtype]


def _rotaries(decoder: DecoderSpec) -> list[RotarySpec]:
    """The rotary embeddings of the layers with KV cells, in order."""
    return [mixer.rotary for mixer in decoder.mixers if isinstance(mixer, CachedSpec)]


def _cell_group(forward: Forward, layer: int) -> CellGroupFields:
    """The cell group of a layer, without segments."""
    return CellGroupFields(cells=_kernel_buffer(forward.layer_kv(layer)[0]).numbers.shape[1])


def _kernel_buffer(layer: LayerKV) -> KernelBuffer:
    buffer = KernelBuffer.of(layer)
    assert buffer is not None, "the load checks the dtype of keys and values"
    return buffer
