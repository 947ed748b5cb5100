"""Quantises the matrices of a plan to their formats: `int8`, or for 4 bits a mix of K formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.kernels.formats import LAYOUTS, WeightFormat
from engine.kernels.packing import PackedMatrix, PackedStorage
from engine.kernels.rounding import Bits, pack_floats
from engine.quantize.calibration import LayerStatistics
from engine.quantize.fit import ColumnStatistics, column_statistics, pack_fitted, without_feedback
from engine.quantize.formats import BASE, UNMEASURED, choose, measure
from engine.quantize.plan import QuantizationPlan
from engine.quantize.stacks import ExpertStack


@dataclass(frozen=True, slots=True)
class PlannedMatrix:
    """A matrix of a plan.

    weight      [outputs, columns]
    statistics  name of the inputs' statistics; None if the inputs are not observed
    """

    name: str
    weight: Tensor
    statistics: str | None


@dataclass(frozen=True, slots=True)
class PlannedEmbedding:
    """An embedding table to replace.

    layer  name of a layer of the plan with the same weights; None: there is none
    """

    name: str
    module: nn.Embedding
    layer: str | None


def planned_matrices(plan: QuantizationPlan) -> Iterator[PlannedMatrix]:
    """All matrices of a plan."""
    for layer in plan.layers:
        yield PlannedMatrix(layer.name, layer.weight, layer.name)
    for name, experts in plan.experts.items():
        for stack, statistics in ((experts.up, name), (experts.down, None)):
            for number, weight in enumerate(stack.matrices):
                yield PlannedMatrix(matrix_name(name, stack, number), weight, statistics)


def matrix_shapes(plan: QuantizationPlan, embeddings: Sequence[PlannedEmbedding] = ()) -> dict[str, tuple[int, int]]:
    """Outputs and columns of the matrices to store, by name; an embedding with a layer is stored with it."""
    weights = {matrix.name: matrix.weight for matrix in planned_matrices(plan)}
    weights |= {embedding.name: embedding.module.weight for embedding in embeddings if embedding.layer is None}
    return {name: (weight.shape[0], weight.shape[1]) for name, weight in weights.items()}


def matrix_name(experts: str, stack: ExpertStack, number: int) -> str:
    """The name of a matrix of experts; `number` counts the parts of all experts."""
    return f"{experts}.{stack.parameter}.{number}"


class MatrixSource(Protocol):
    """Makes the quantised matrices of a plan."""

    @property
    def formats(self) -> Mapping[str, WeightFormat]:
        """The format of each matrix by name."""
        ...

    def quantize(self, name: str, weight: Tensor, storage: PackedStorage) -> PackedMatrix:
        """The quantised matrix with original weights [outputs, columns]. Raises ValueError."""
        ...


class Quantizer:
    """Quantises matrices by name.

    formats  by name
    """

    def __init__(self, bits: Bits, plan: QuantizationPlan, statistics: Mapping[str, LayerStatistics]) -> None:
        """With 4 bits, the formats are chosen by `statistics` of layers and of modules with experts, by name."""
        matrices = list(planned_matrices(plan))
        self._statistics = {
            matrix.name: statistics[matrix.statistics]
            for matrix in matrices
            if matrix.statistics is not None and matrix.statistics in statistics
        }
        if bits == 8:
            self.formats: dict[str, WeightFormat] = {matrix.name: "int8" for matrix in matrices}
        else:
            self.formats = self._choose(matrices)
        # The statistics of the last inputs: layers of a group have the same ones.
        self._inputs: Tensor | None = None
        self._columns: ColumnStatistics | None = None

    def quantize(self, name: str, weight: Tensor, storage: PackedStorage) -> PackedMatrix:
        """The quantised matrix with original weights [outputs, columns]."""
        if self.formats[name] == "int8":
            return pack_floats(weight, 8, storage)
        return pack_fitted(weight, self.formats[name], self._column_statistics(name, weight.shape[1]), storage)

    def _column_statistics(self, name: str, columns: int) -> ColumnStatistics:
        if name not in self._statistics:
            return without_feedback(torch.ones(columns))
        inputs = self._statistics[name].inputs
        if self._columns is None or inputs is not self._inputs:
            self._inputs, self._columns = inputs, column_statistics(inputs)
        return self._columns

    def _choose(self, matrices: list[PlannedMatrix]) -> dict[str, WeightFormat]:
        effects, others = {}, {}
        for matrix in matrices:
            statistics = self._statistics.get(matrix.name)
            effect = None if statistics is None else measure(matrix.weight, statistics)
            if effect is None:
                others[matrix.name] = (matrix.weight.numel(), UNMEASURED if statistics is None else BASE)
            else:
                effects[matrix.name] = effect
        return choose(effects, others)


def describe_formats(matrices: Mapping[str, PackedMatrix]) -> str:
    """The share of each format and the average number of bits, for the log."""
    weights = Counter[WeightFormat]()
    for matrix in matrices.values():
        weights[matrix.format] += matrix.outputs * matrix.columns
    total = weights.total()
    average = sum(LAYOUTS[format].weight_bits * count for format, count in weights.items()) / max(total, 1)
    shares = ", ".join(f"{count / total:.0%} {format}" for format, count in weights.most_common())
    return f"{average:.2f} bits a weight ({shares})"
