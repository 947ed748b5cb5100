"""The recurrent states that a native step reads and makes, by their addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from ctypes import c_void_p

import torch
from torch import Tensor

from engine.native.decoder import DeltaRuleSpec, RecurrenceSpec, StateSpaceSpec
from engine.native.step_library import DeltaRuleFields, PieceFields, RecurrenceFields, StateSpaceFields
from kvcache.forward import Forward


class RecurrentStates:
    """Those of the spans of one forward; it must outlive the step. Nothing is written that was there before."""

    def __init__(self, forward: Forward) -> None:
        pieces = [(at, span.slot, *piece) for at, span in enumerate(forward.spans) for piece in span.state_ranges]
        self._forward, self._pieces = forward, pieces
        self._held: list[Tensor] = []
        self._made: list[tuple[Hashable, list[Tensor]]] = []
        self.fields = (PieceFields * len(pieces))()
        row = 0
        for fields, (at, _, start, stop) in zip(self.fields, pieces, strict=True):
            fields.row, fields.rows, fields.span = row, stop - start, at
            row += stop - start

    def bind(self, way: RecurrenceSpec, fields: RecurrenceFields) -> None:
        """Let a layer's fields name its states before the spans, and new ones behind each piece."""
        kernel, channels = way.convolution.weights.shape
        own = fields.convolution
        own.before, own.after = self._open(way.convolution.name, (channels, kernel - 1))
        if isinstance(way, DeltaRuleSpec) and isinstance(fields, DeltaRuleFields):
            shape = (1, way.value_heads, way.key_width, way.value_width)
            fields.before, fields.after = self._open(way.state_name, shape)
        if isinstance(way, StateSpaceSpec) and isinstance(fields, StateSpaceFields):
            shape = (1, way.heads, way.value_width, way.key_width)
            fields.before, fields.after = self._open(way.state_name, shape)

    def commit(self) -> None:
        """Hand over what the step has made."""
        for name, made in self._made:
            for (_, slot, _, stop), state in zip(self._pieces, made, strict=True):
                self._forward.store_recurrent_state(slot, stop, name, state)

    def _open(self, name: Hashable, shape: Sequence[int]) -> tuple[ctypes.Array[c_void_p], ctypes.Array[c_void_p]]:
        before = [self._forward.recurrent_state(span.slot, span.start, name) for span in self._forward.spans]
        # The modules keep some states in the format of their weights.
        known = [None if state is None else state.float().contiguous() for state in before]
        made = [torch.empty(shape) for _ in self._pieces]
        self._held += [state for state in known if state is not None]
        self._made.append((name, made))
        return _addresses(known), _addresses(made)


def _addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))
