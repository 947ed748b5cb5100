"""The quantised replacement of a layer's experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.kernels.device_products import DeviceProducts, MultiplyByExpert
from engine.kernels.linear import MultiplyRows, PrepareMatrices
from engine.kernels.packing import PackedMatrix
from engine.quantize.stacks import Experts, ExpertStack


class QuantizedExperts(nn.Module):
    """Experts with quantised matrices: one up and one down projection each, in one or more parts (ExpertStack)."""

    def __init__(
        self, experts: Experts, up: Sequence[PackedMatrix], down: Sequence[PackedMatrix], prepare: PrepareMatrices
    ) -> None:
        """`experts` are the original ones, which keep their biases and parameters without matrices."""
        super().__init__()
        self.experts, self.up, self.down = experts, tuple(up), tuple(down)
        self.original = experts.module
        self._up, self._down = _Products(experts.up, up, prepare), _Products(experts.down, down, prepare)

    @property
    def weights(self) -> int:
        """Number of quantised weights."""
        return sum(matrix.outputs * matrix.columns for matrix in (*self.up, *self.down))

    @property
    def bytes(self) -> int:
        """Memory of the matrices."""
        return sum(matrix.size_bytes for matrix in (*self.up, *self.down))

    def forward(self, rows: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of expert outputs for rows [rows, columns], with expert indices and router weights [rows,
        ranks].

        An index beyond all experts adds nothing.
        """
        # Pairs of a row and a rank, sorted by expert.
        experts, order = indices.flatten().sort(stable=True)
        inputs = rows[order // indices.shape[1]]
        hidden = self.experts.activate(self._up.multiply(inputs, experts))
        outputs = self.experts.post_norm(self._down.multiply(hidden, experts))
        weighted = outputs * weights.flatten()[order][:, None]
        weighted = weighted.masked_fill((experts >= self._up.experts)[:, None], 0)
        parts = weighted.new_zeros(indices.numel(), outputs.shape[1])
        parts[order] = weighted
        # Adding rank by rank makes the order of each row's sum independent of the number of rows.
        total = torch.zeros_like(parts[:: indices.shape[1]])
        for rank in range(indices.shape[1]):
            total += parts[rank :: indices.shape[1]]
        return total.to(rows.dtype)


class _Products:
    """The products with the matrices of one stack.

    experts  their number
    """

    def __init__(self, stack: ExpertStack, matrices: Sequence[PackedMatrix], prepare: PrepareMatrices) -> None:
        starts = range(0, len(matrices), stack.parts)
        self._multiply: list[MultiplyRows] = [prepare(matrices[start : start + stack.parts]) for start in starts]
        self._width = sum(matrix.outputs for matrix in matrices[: stack.parts])
        self._stack, self.experts = stack, len(starts)
        self._by_expert = _multiply_by_expert(matrices, stack.parts, prepare)

    def multiply(self, inputs: Tensor, experts: Tensor) -> Tensor:
        """Each input [inputs, columns] times the matrix of its expert index, plus its bias; indices are ascending.

        Of an index beyond all experts: any finite numbers.
        """
        if self._by_expert and inputs.dtype != torch.float64:
            outputs = torch.cat([multiply(inputs, experts) for multiply in self._by_expert], 1)
        else:
            outputs = self._expert_by_expert(inputs, experts)
        if self._stack.bias is None:
            return outputs
        return outputs + self._stack.bias[experts.clamp_max(self.experts - 1)]

    def _expert_by_expert(self, inputs: Tensor, experts: Tensor) -> Tensor:
        outputs = inputs.new_zeros(len(inputs), self._width)
        start = 0
        counts = experts.bincount(minlength=self.experts).tolist()
        for multiply, count in zip(self._multiply, counts[: self.experts], strict=True):
            if count:
                outputs[start : start + count] = torch.cat(multiply(inputs[start : start + count]), 1)
                start += count
        return outputs


def _multiply_by_expert(
    matrices: Sequence[PackedMatrix], parts: int, prepare: PrepareMatrices
) -> list[MultiplyByExpert]:
    """By part, the products on the device alone; empty: it has none."""
    if not isinstance(prepare, DeviceProducts):
        return []
    products = [prepare.experts(matrices[part::parts]) for part in range(parts)]
    return [] if None in products else [product for product in products if product is not None]
