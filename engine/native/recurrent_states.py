"""The recurrent states of one forward, for a native step."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from ctypes import c_void_p

import torch
from torch import Tensor

from engine.native.decoder import DeltaRuleSpec, RecurrenceSpec, StateSpaceSpec
from engine.native.step_library import DeltaRuleFields, RecurrenceFields, StateRangeFields, StateSpaceFields
from kvcache.forward import Forward


class RecurrentStates:
    """Provides states by address; it must outlive the step. The states of the cache are not written."""

    def __init__(self, forward: Forward) -> None:
        ranges = [
            (index, span.slot, *state_range)
            for index, span in enumerate(forward.spans)
            for state_range in span.state_ranges
        ]
        self._forward, self._ranges = forward, ranges
        self._inputs: list[Tensor] = []
        self._outputs: list[tuple[Hashable, list[Tensor]]] = []
        self.fields = (StateRangeFields * len(ranges))()
        row = 0
        for fields, (index, _, start, stop) in zip(self.fields, ranges, strict=True):
            fields.row, fields.rows, fields.span = row, stop - start, index
            row += stop - start

    def bind(self, recurrence: RecurrenceSpec, fields: RecurrenceFields) -> None:
        """Set the addresses of a layer: its states before each span, and new ones after each state range."""
        kernel, channels = recurrence.convolution.weights.shape
        convolution = fields.convolution
        convolution.states_before, convolution.states_after = self._addresses(
            recurrence.convolution.state_name, (channels, kernel - 1)
        )
        if isinstance(recurrence, DeltaRuleSpec) and isinstance(fields, DeltaRuleFields):
            shape = (1, recurrence.value_heads, recurrence.key_width, recurrence.value_width)
            fields.states_before, fields.states_after = self._addresses(recurrence.state_name, shape)
        if isinstance(recurrence, StateSpaceSpec) and isinstance(fields, StateSpaceFields):
            shape = (1, recurrence.heads, recurrence.value_width, recurrence.key_width)
            fields.states_before, fields.states_after = self._addresses(recurrence.state_name, shape)

    def commit(self) -> None:
        """Store the new states in the cache."""
        for name, states in self._outputs:
            for (_, slot, _, stop), state in zip(self._ranges, states, strict=True):
                self._forward.store_recurrent_state(slot, stop, name, state)

    def _addresses(self, name: Hashable, shape: Sequence[int]) -> tuple[ctypes.Array[c_void_p], ctypes.Array[c_void_p]]:
        cached = [self._forward.recurrent_state(span.slot, span.start, name) for span in self._forward.spans]
        # The modules store some states in the dtype of their weights.
        before = [None if state is None else state.float().contiguous() for state in cached]
        after = [torch.empty(shape) for _ in self._ranges]
        self._inputs += [state for state in before if state is not None]
        self._outputs.append((name, after))
        return _pointers(before), _pointers(after)


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))
