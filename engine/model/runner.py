"""Runs the model over the spans of one forward, every layer attending to its own sequence's cells."""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from engine.kernels import latent, reference
from engine.kernels.products import RowInvariantProduct
from engine.kernels.reference import AttentionFunction
from engine.model import hooks, rope
from engine.model.encoder_mask import EncoderMask
from engine.model.invariant import RowInvariant
from engine.model.layers import CachedLayer
from engine.model.model_runner import ModelRunner
from engine.model.rope import RopeSwitch
from engine.sample.sampler import Sampler, TorchSampler
from engine.types.request import MlaMode
from kvcache.forward import Forward


class PackedRunner(ModelRunner):
    """A model whose attention reads and writes the shared cache. Belongs to the engine thread.

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
        extended_layers: Sequence[CachedLayer] | None = None,
    ) -> None:
        """`attend` computes attention over cells, but for latent and for cross attention."""
        self.model = model
        self.layers, self.switch = tuple(layers), switch
        self.sampler: Sampler = TorchSampler()
        self.extended_layers = self.layers if extended_layers is None else tuple(extended_layers)
        self._device = next(model.parameters()).device
        self._cache_layers = {
            layer: index for index, plan in enumerate(layers) for layer in (plan.index, *plan.sharing_layers)
        }
        self._sharing_layers = frozenset(layer for plan in layers for layer in plan.sharing_layers)
        self._mla, self._attend = mla, attend
        self._invariant: RowInvariant | None = None
        self.has_hidden_states = False

    def make_invariant(self, product: RowInvariantProduct) -> None:
        """From now on compute each row alike whatever is beside it, where torch computes: see invariant.py.

        All latents are absorbed, and recurrences take rows one by one: other forms would depend on the chunk.
        """
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
        """Computes attention over KV cells, but for latent attention and cross-attention."""
        return self._attend

    def supports(self, forward: Forward, encoder_masks: Sequence[EncoderMask | None] = ()) -> bool:
        """All forwards."""
        return True

    def run(
        self,
        forward: Forward,
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        encoder_masks: Sequence[EncoderMask | None] = (),
    ) -> Tensor:
        """See ModelRunner."""
        return self._run(forward, tokens, self._tensor(logit_rows), encoder_masks)

    def run_with_hidden_states(
        self,
        forward: Forward,
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        hidden_rows: Sequence[int],
        encoder_masks: Sequence[EncoderMask | None] = (),
    ) -> tuple[Tensor, Tensor]:
        """As `run`, and the states [pooled, width] of rows as they enter the output layer; both ascending."""
        with hooks.capture_hidden_states(self.model, self._tensor(logit_rows), self._tensor(hidden_rows)) as tap:
            logits = self._run(forward, tokens, tap.output_rows, encoder_masks)
        return logits, tap.hidden_states

    def _run(
        self, forward: Forward, tokens: Sequence[int], logit_rows: Tensor, encoder_masks: Sequence[EncoderMask | None]
    ) -> Tensor:
        positions = [position for span in forward.spans for position in range(span.start, span.stop)]
        rows = (self._tensor(tokens), self._tensor(positions), logit_rows)
        arithmetic = self._invariant or nullcontext()
        extended = rope.extending(None if self.switch is None else self.switch.extended(forward.spans))
        with torch.inference_mode(), hooks.use_backend(self._backend(forward, encoder_masks)), extended, arithmetic:
            return hooks.forward(self.model, *rows, cross_mask=self._cross_mask(forward, encoder_masks))

    def _backend(self, forward: Forward, encoder_masks: Sequence[EncoderMask | None]) -> _CacheBackend:
        by_rows = self._invariant is not None
        return _CacheBackend(
            forward, self._cache_layers, self._sharing_layers, self._mla, self._attend, encoder_masks, by_rows
        )

    def _cross_mask(self, forward: Forward, encoder_masks: Sequence[EncoderMask | None]) -> Tensor | None:
        """Which rows look at an encoder entry; None where no sequence of the batch has one."""
        if not any(encoder_masks):
            return None
        pairs = zip(forward.spans, encoder_masks, strict=True)
        blind = torch.zeros(forward.batch_tokens, dtype=torch.bool)
        parts = [
            blind[: span.length] if sight is None else sight.attending(span.start, span.stop) for span, sight in pairs
        ]
        return torch.cat(parts).to(self._device)

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._device)


class _CacheBackend:
    """A listener (hooks.Listener) for one forward: stores each layer's rows, then attends to the whole sequence."""

    def __init__(
        self,
        forward: Forward,
        cache_layers: Mapping[int, int],
        sharing_layers: Container[int],
        mla: MlaMode,
        attend: AttentionFunction,
        encoder_masks: Sequence[EncoderMask | None],
        row_by_row: bool,
    ) -> None:
        self._forward, self._encoder_masks, self._row_by_row = forward, encoder_masks, row_by_row
        self._cache_layers, self._sharing_layers, self._mla, self._attend = cache_layers, sharing_layers, mla, attend

    def attend(self, call: hooks.AttentionCall) -> Tensor:
        """The attention output of one layer, [rows, heads, value_width]."""
        if call.is_cross:
            return self._cross(call)
        layer = self._cache_layers[call.layer]
        if call.layer not in self._sharing_layers:
            self._forward.store_kv(layer, call.key, call.value)
        keys, values = self._forward.layer_kv(layer)
        segments, reach = self._forward.segments(layer), self._forward.attention_range(layer)
        if call.latent is not None:
            return latent.attend(call.query, keys, segments, reach, call.latent, scale=call.scale, mode=self._mla)
        return self._attend(
            call.query,
            keys,
            values,
            segments,
            reach,
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
            bias=call.bias,
        )

    def _cross(self, call: hooks.AttentionCall) -> Tensor:
        """Each sequence's rows attend to what an encoder made for it; rows without such get zeros."""
        output, row = torch.zeros_like(call.query).transpose(0, 1), 0
        for span, sight in zip(self._forward.spans, self._encoder_masks, strict=True):
            rows = slice(row, row + span.length)
            if sight is not None:
                keys, values = sight.entry.layers[call.layer]
                mask = sight.mask(span.start, span.stop, keys.shape[1])
                mask = None if mask is None else mask.to(keys.device)
                output[rows] = reference.cross_attend(call.query[:, rows], keys, values, mask, scale=call.scale)
            row = rows.stop
        return output

    def recur(self, name: Hashable, operation: hooks.RecurrentOperation) -> list[Tensor]:
        """Run a recurrent operation for each piece of a span, from the slot's state to its next one."""
        outputs, row = [], 0
        for span in self._forward.spans:
            for start, stop in span.state_ranges:
                state, length = self._forward.recurrent_state(span.slot, start, name), stop - start
                own, after = (_run_rows if self._row_by_row else _run_chunk)(operation, row, row + length, state)
                self._forward.store_recurrent_state(span.slot, stop, name, after)
                outputs += own
                row += length
        return outputs


def _run_chunk(
    run: hooks.RecurrentOperation, start: int, stop: int, state: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """The output of rows [start, stop) behind a state, and the state behind them."""
    output, after = run(start, stop, state)
    return [output], after


def _run_rows(
    run: hooks.RecurrentOperation, start: int, stop: int, state: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """The same of each row alone: calls of one shape, whose bits no chunk changes and no other arithmetic has to."""
    outputs = []
    with torch._C.DisableTorchFunction():
        for row in range(start, stop):
            output, after = run(row, row + 1, state)
            state = after.contiguous()
            outputs.append(output)
    assert state is not None, "a piece of a span has rows"
    return outputs, state
