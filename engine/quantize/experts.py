"""The quantised replacement of a layer's experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.kernels.linear import MultiplyRows, PrepareMatrices
from engine.kernels.packing import PackedMatrix
from engine.quantize.stacks import Experts


class QuantizedExperts(nn.Module):
    """Experts with quantised matrices: one up and one down projection each."""

    def __init__(
        self, experts: Experts, up: Sequence[PackedMatrix], down: Sequence[PackedMatrix], prepare: PrepareMatrices
    ) -> None:
        """`experts` are the original ones, which keep their biases and parameters without matrices."""
        super().__init__()
        self.experts, self.up, self.down = experts, tuple(up), tuple(down)
        self.original = experts.module
        self._up, self._down = ([prepare([matrix]) for matrix in matrices] for matrices in (up, down))

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
        experts = experts[experts < len(self.up)]
        order = order[: len(experts)]
        inputs = rows[order // indices.shape[1]]
        up = _multiply(self._up, inputs, experts, self.up[0].outputs, self.experts.up.bias)
        hidden = self.experts.activate(up)
        outputs = self.experts.post_norm(
            _multiply(self._down, hidden, experts, self.down[0].outputs, self.experts.down.bias)
        )
        weighted = outputs * weights.flatten()[order][:, None]
        parts = weighted.new_zeros(indices.numel(), outputs.shape[1])
        parts[order] = weighted
        # Adding rank by rank makes the order of each row's sum independent of the number of rows.
        total = torch.zeros_like(parts[:: indices.shape[1]])
        for rank in range(indices.shape[1]):
            total += parts[rank :: indices.shape[1]]
        return total.to(rows.dtype)


def _multiply(
    matrices: Sequence[MultiplyRows], inputs: Tensor, experts: Tensor, width: int, biases: Tensor | None
) -> Tensor:
    """Each input [inputs, columns] times the matrix of its expert index, plus its bias; indices are ascending."""
    outputs = inputs.new_empty(len(inputs), width)
    start = 0
    for matrix, count in zip(matrices, torch.bincount(experts, minlength=len(matrices)).tolist(), strict=True):
        if count:
            [outputs[start : start + count]] = matrix(inputs[start : start + count])
            start += count
    return outputs if biases is None else outputs + biases[experts]
