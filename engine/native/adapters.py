"""The factors of LoRA adapters in the native step, by the slots of the adapters (engine/adapters/store.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from engine.adapters.adapter import LowRank
from engine.native.step_library import AdapterRangeFields, LayerFields, LinearFields, LowRankFields, StepFields
from engine.native.trace import LinearModule
from engine.quantize.layers import QuantizedLinear
from kvcache.spec import Span

_FORMATS = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True, slots=True)
class _Factors:
    """The factors of one adapter: an array by `Linear::low_rank`, which points into the adapter's tensors."""

    fields: ctypes.Array[LowRankFields]
    max_rank: int
    layers: Mapping[str, LowRank]


class NativeAdapters:
    """The adapters that a native step computes. Belongs to the engine thread.

    names  of the linear layers that adapters may change
    """

    def __init__(self, layers: Iterable[LayerFields], modules: Mapping[str, LinearModule]) -> None:
        """Numbers those matrices of `layers` that are weights of `modules`, the linear layers of the model by name."""
        names = {_identity_of(module): name for name, module in modules.items()}
        self._indices: dict[str, int] = {}
        for matrix in _matrices(layers):
            name = names.get((matrix.weights, matrix.outputs, matrix.columns))
            if name is not None:
                matrix.low_rank = self._indices.setdefault(name, len(self._indices) + 1)
        self.names = frozenset(self._indices)
        self._factors: dict[int, _Factors] = {}

    def set(self, slot: int, layers: Mapping[str, LowRank]) -> None:
        """Set the factors of a slot, by `names`."""
        fields = (LowRankFields * (len(self._indices) + 1))()
        for name, pair in layers.items():
            fields[self._indices[name]] = _describe(pair)
        self._factors[slot] = _Factors(fields, max(pair.down.shape[0] for pair in layers.values()), layers)

    def clear(self, slot: int) -> None:
        """Remove the factors of a slot."""
        self._factors.pop(slot, None)

    def describe(self, spans: Sequence[Span], slots: Sequence[int], step: StepFields) -> None:
        """Set the adapters of a step by its spans; slot 0 or no slots: none. The fields keep what they point to."""
        ranges: list[AdapterRangeFields] = []
        row = max_rank = 0
        for slot, group in groupby(zip(slots, spans, strict=bool(slots)), key=lambda pair: pair[0]):
            rows = sum(span.length for _, span in group)
            if slot:
                factors = self._factors[slot]
                ranges.append(AdapterRangeFields(row, rows, factors.fields))
                max_rank = max(max_rank, factors.max_rank)
            row += rows
        step.adapter_ranges = (AdapterRangeFields * len(ranges))(*ranges) if ranges else None
        step.adapter_range_count, step.max_rank = len(ranges), max_rank


def _identity_of(module: LinearModule) -> tuple[int, int, int]:
    """The address of the weights or codes, and their shape."""
    weights = module.packed.codes if isinstance(module, QuantizedLinear) else module.weight
    return weights.data_ptr(), module.out_features, module.in_features


def _matrices(layers: Iterable[LayerFields]) -> Iterator[LinearFields]:
    """The matrices that adapters may change: not those of single experts, nor the absorbed ones of latent attention."""
    for layer in layers:
        yield from layer.projections[: layer.projection_count]
        yield from (layer.output, *layer.inner[: layer.inner_count], layer.down)
        if layer.latents:
            yield layer.latents.contents.query_expansion
        if layer.per_layer:
            yield from (layer.per_layer.contents.gate, layer.per_layer.contents.projection)
        if layer.experts:
            yield from (layer.experts.contents.router, layer.experts.contents.shared_gate)


def _describe(pair: LowRank) -> LowRankFields:
    down, up = pair.down, pair.up
    assert down.is_contiguous(), "the native step reads factors by rows"
    assert up.is_contiguous(), "the native step reads factors by rows"
    return LowRankFields(down.data_ptr(), up.data_ptr(), _FORMATS[down.dtype], down.shape[0])
