"""Runs the model over the spans of a forward; every layer attends to the cells of the token's sequence."""

from __future__ import annotations

import itertools
from collections.abc import Container, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.adapters.modules import use_adapters
from engine.kernels import latent, reference
from engine.kernels.attention_input import AttentionFunction, AttentionInput
from engine.kernels.cell_kernels import CellKernels
from engine.kernels.products import RowInvariantProduct
from engine.model import hooks, injection, rope
from engine.model.invariant import RowInvariant
from engine.model.layers import CachedLayer
from engine.model.rope import RopeSwitch
from engine.run.runner import LocalRunner
from engine.sample.sampler import Sampler, TorchSampler
from engine.step.encoder_mask import EncoderMask
from engine.step.input import StepFeatures, StepInput, decoder_layers_of
from engine.step.output import StepOutput, sampled_output
from engine.types.request import MlaMode
from kvcache.forward import Forward
from kvcache.kv_buffer import store_rows
from kvcache.row_forward import StateRows
from kvcache.spec import Span

NO_HIDDEN_STATES = "the hidden states of this model are not accessible"


def hidden_states_reason(model: Any, layers: Sequence[int], *, has_hidden_states: bool) -> str | None:
    """Why hidden states after some layers of a model (HiddenRows) are not returned; None if they are."""
    if layers and not has_hidden_states:
        return NO_HIDDEN_STATES
    named = decoder_layers_of(layers)
    count = len(hooks.decoder_layers(model)) if named else 0
    if named and count == 0:
        return NO_HIDDEN_STATES
    return next((f"the model has no layer {layer}" for layer in named if not 0 <= layer < count), None)


def output_arrays(logit_rows: Sequence[int], hidden_rows: Sequence[int] | None) -> list[Sequence[int]]:
    """The rows with logits or hidden states; with hidden states also which of them have logits, and which states."""
    if hidden_rows is None:
        return [logit_rows]
    rows = sorted({*logit_rows, *hidden_rows})
    place = {row: index for index, row in enumerate(rows)}
    return [rows, [place[row] for row in logit_rows], [place[row] for row in hidden_rows]]


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """Inputs of the model, int64 on its device: tokens and positions [batch tokens], and indices of rows.

    output_rows    rows with logits or hidden states
    hidden         which of the output rows have logits and which hidden states; None: all have logits alone
    state_rows     tokens of `single_rows`, whose recurrent operations are computed together; None: there are none
    position_axes  `StepInput.positions`
    """

    tokens: Tensor
    positions: Tensor
    output_rows: Tensor
    hidden: hooks.OutputIndices | None = None
    state_rows: StateRows | None = None
    position_axes: Tensor | None = None


def single_rows(spans: Sequence[Span]) -> dict[int, Span]:
    """By row the spans of one token that is not the first of its sequence."""
    ends = itertools.accumulate(span.length for span in spans)
    return {end - 1: span for span, end in zip(spans, ends, strict=True) if span.length == 1 and span.start > 0}


class PooledStates(Protocol):
    """A forward with a pool of recurrent states."""

    def pooled_states(self, name: Hashable) -> Tensor:
        """See Forward."""
        ...


def recur_rows(forward: PooledStates, name: Hashable, operation: hooks.RecurrentOperation, rows: StateRows) -> Tensor:
    """The outputs [tokens, ...] of tokens of different sequences; their next states are in the pool then.

    The number of tokens has no effect on the number of operations.
    """
    states = forward.pooled_states(name)
    outputs, after = operation.run_rows(rows.tokens, states.index_select(0, rows.before))
    states.index_copy_(0, rows.after, after.to(states.dtype))
    return outputs


class PackedRunner(LocalRunner):
    """Runs packed batches of a transformers model over the shared cache. Belongs to the engine thread.

    model  transformers' model, with the hooks of engine/model/hooks.py
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[CachedLayer],
        mla: MlaMode = "auto",
        attend: AttentionFunction = reference.attend,
        *,
        switch: RopeSwitch | None = None,
        long_factor_layers: Sequence[CachedLayer] | None = None,
    ) -> None:
        """`attend` computes attention over cells, except latent and cross attention."""
        self.model = model
        self.layers, self.switch = tuple(layers), switch
        self.sampler: Sampler = TorchSampler()
        self.long_factor_layers = self.layers if long_factor_layers is None else tuple(long_factor_layers)
        self._device = next(model.parameters()).device
        self._cache_layers = {
            layer: index for index, cached in enumerate(layers) for layer in (cached.index, *cached.sharing_layers)
        }
        self._sharing_layers = frozenset(layer for cached in layers for layer in cached.sharing_layers)
        self._mla, self._attend = mla, attend
        self._invariant: RowInvariant | None = None
        # Whether the self-test found that the model calls its output layer.
        self.has_hidden_states = False

    def make_invariant(self, product: RowInvariantProduct) -> None:
        """See LocalRunner. Absorbs all latents and runs recurrences token by token: other forms depend on the chunk."""
        self._invariant = RowInvariant(product)
        self._mla = "absorb" if self._mla == "auto" else self._mla
        if self._attend is reference.attend:
            self._attend = reference.attend_aligned

    @property
    def mla(self) -> MlaMode:
        """The algorithm of latent attention."""
        return self._mla

    @property
    def attend(self) -> AttentionFunction:
        """The attention kernel over cells, except for latent and cross attention."""
        return self._attend

    def supports(self, features: StepFeatures) -> str | None:
        """See ModelRunner."""
        return hidden_states_reason(self.model, features.hidden_layers, has_hidden_states=self.has_hidden_states)

    def run(self, step: StepInput) -> StepOutput:
        """See ModelRunner."""
        return sampled_output(step, self.sampler, *self._run(step, self._inputs(step)))

    def _inputs(self, step: StepInput) -> BatchInputs:
        positions = [position for span in step.forward.spans for position in range(span.start, span.stop)]
        output_rows, *places = output_arrays(step.logit_rows, None if step.hidden is None else step.hidden.rows)
        hidden = hooks.OutputIndices(*map(self._tensor, places)) if places else None
        rows = (self._tensor(step.tokens), self._tensor(positions), self._tensor(output_rows))
        return BatchInputs(*rows, hidden, position_axes=step.positions)

    def _run(self, step: StepInput, inputs: BatchInputs) -> tuple[Tensor, Mapping[int, Tensor]]:
        """Logits, and hidden states by layer."""
        forward, masks = step.forward, step.encoder_masks
        tokens = injection.embeddable(self.model, inputs.tokens) if step.embeddings else inputs.tokens
        rows = (tokens, inputs.positions, inputs.output_rows)
        invariant = self._invariant or nullcontext()
        factors = rope.use_long_factors(None if self.switch is None else self.switch.long_factors(forward.spans))
        backend = self._backend(forward, masks, inputs.state_rows)
        adapters = use_adapters([span.length for span in forward.spans], step.adapters)
        contents = injection.inject(self.model, step.embeddings)
        with torch.inference_mode(), hooks.use_backend(backend), factors, adapters, contents, invariant:
            further: dict[str, Any] = {
                "cross_mask": self._cross_mask(forward, masks),
                "position_axes": inputs.position_axes,
            }
            if inputs.hidden is None or step.hidden is None:
                return hooks.forward(self.model, *rows, **further), {}
            with hooks.capture_hidden_states(
                self.model, inputs.output_rows, inputs.hidden, step.hidden.layers
            ) as states:
                logits = hooks.forward(self.model, *rows, **further)
            return logits, states

    def _backend(
        self, forward: Forward, encoder_masks: Sequence[EncoderMask | None], state_rows: StateRows | None = None
    ) -> _CacheBackend:
        return _CacheBackend(
            forward,
            self._cache_layers,
            self._sharing_layers,
            self._mla,
            self._attend,
            encoder_masks,
            self._invariant is not None,
            state_rows,
        )

    def _cross_mask(self, forward: Forward, encoder_masks: Sequence[EncoderMask | None]) -> Tensor | None:
        """Which tokens attend to an encoder entry; None if no sequence of the batch has one."""
        if not any(encoder_masks):
            return None
        spans = zip(forward.spans, encoder_masks, strict=True)
        no_attention = torch.zeros(forward.batch_tokens, dtype=torch.bool)
        parts = [
            no_attention[: span.length] if mask is None else mask.attending(span.start, span.stop)
            for span, mask in spans
        ]
        return torch.cat(parts).to(self._device)

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._device)


class _CacheBackend:
    """The AttentionBackend of one forward: stores the keys and values of each layer, then attends to the whole
    sequence.
    """

    def __init__(
        self,
        forward: Forward,
        cache_layers: Mapping[int, int],
        sharing_layers: Container[int],
        mla: MlaMode,
        attend: AttentionFunction,
        encoder_masks: Sequence[EncoderMask | None],
        row_by_row: bool,
        state_rows: StateRows | None,
    ) -> None:
        self._forward, self._encoder_masks, self._row_by_row = forward, encoder_masks, row_by_row
        self._cache_layers, self._sharing_layers, self._mla, self._attend = cache_layers, sharing_layers, mla, attend
        self._state_rows = state_rows
        self._store = attend.store if isinstance(attend, CellKernels) else store_rows
        self._attend_latent = attend.attend_latent if isinstance(attend, CellKernels) else latent.attend

    def attend(self, call: hooks.AttentionCall) -> Tensor:
        """The attention output of one layer [tokens, heads, value_width]."""
        if call.is_cross:
            return self._cross(call)
        layer = self._cache_layers[call.layer]
        if call.layer not in self._sharing_layers:
            self._forward.store_kv(layer, call.key, call.value, self._store)
        keys, values = self._forward.layer_kv(layer)
        segments, attention_range = self._forward.segments(layer), self._forward.attention_range(layer)
        cells = (keys, values, segments, attention_range)
        if call.latent is not None:
            return self._attend_latent(AttentionInput(call.query, *cells, call.scale), call.latent, mode=self._mla)
        return self._attend(AttentionInput(call.query, *cells, call.scale, call.softcap, call.sinks, call.bias))

    def _cross(self, call: hooks.AttentionCall) -> Tensor:
        """Tokens of each sequence attend to its encoder entry; tokens without one get zeros."""
        output, row = torch.zeros_like(call.query).transpose(0, 1), 0
        for span, mask in zip(self._forward.spans, self._encoder_masks, strict=True):
            rows = slice(row, row + span.length)
            if mask is not None:
                keys, values = mask.entry.layers[call.layer]
                visible = mask.mask(span.start, span.stop, keys.shape[1])
                visible = None if visible is None else visible.to(keys.device)
                output[rows] = reference.cross_attend(call.query[:, rows], keys, values, visible, scale=call.scale)
            row = rows.stop
        return output

    def recur(self, name: Hashable, operation: hooks.RecurrentOperation) -> list[Tensor]:
        """Run a recurrent operation for each piece of a span, from the slot's state to its next one."""
        together = {} if self._state_rows is None else self._recur_together(name, operation, self._state_rows)
        outputs, row = [], 0
        for span in self._forward.spans:
            if row in together:
                outputs.append(together[row])
                row += 1
                continue
            for start, stop in span.state_ranges:
                state, length = self._forward.recurrent_state(span.slot, start, name), stop - start
                tokens, after = (_run_rows if self._row_by_row else _run_chunk)(operation, row, row + length, state)
                self._forward.store_recurrent_state(span.slot, stop, name, after)
                outputs += tokens
                row += length
        return outputs

    def _recur_together(
        self, name: Hashable, operation: hooks.RecurrentOperation, rows: StateRows
    ) -> dict[int, Tensor]:
        """The outputs of `single_rows`, by row."""
        outputs = recur_rows(self._forward, name, operation, rows)
        return dict(zip(single_rows(self._forward.spans), torch.split(outputs, 1), strict=True))


def _run_chunk(
    operation: hooks.RecurrentOperation, start: int, stop: int, state: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """The output of tokens [start, stop) from a state, and the next state."""
    output, after = operation(start, stop, state)
    return [output], after


def _run_rows(
    operation: hooks.RecurrentOperation, start: int, stop: int, state: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """As `_run_chunk`, one token at a time: calls of equal shape, so their bits do not depend on the chunk."""
    outputs = []
    with torch._C.DisableTorchFunction():
        for row in range(start, stop):
            output, after = operation(row, row + 1, state)
            state = after.contiguous()
            outputs.append(output)
    assert state is not None, "a piece of a span has rows"
    return outputs, state
