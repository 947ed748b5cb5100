"""What stands in a model where experts stood: the same function of rows, with quantised matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.kernels.linear import MultiplyRows, PrepareMatrices
from engine.kernels.packing import PackedMatrix
from engine.quantize.stacks import Experts


class QuantizedExperts(nn.Module):
    """Experts whose matrices are codes and scales (engine/kernels/packing.py), one of each kind for every expert."""

    def __init__(
        self, experts: Experts, inner: Sequence[PackedMatrix], down: Sequence[PackedMatrix], prepare: PrepareMatrices
    ) -> None:
        """`experts` are those that it stands for, which keep their biases, and all that needs no matrix."""
        super().__init__()
        self.experts, self.up, self.down = experts, tuple(inner), tuple(down)
        self.original = experts.module
        self._up, self._down = ([prepare([one]) for one in matrices] for matrices in (inner, down))

    @property
    def weights(self) -> int:
        """How many there are."""
        return sum(one.outputs * one.columns for one in (*self.up, *self.down))

    @property
    def bytes(self) -> int:
        """What the matrices take."""
        return sum(one.size_bytes for one in (*self.up, *self.down))

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """What rows [rows, columns] become by the experts of the numbers [rows, ranks], each as much as it weighs.

        A number beyond all experts stands for one that makes nothing.
        """
        # Lines are pairs of a row and a rank, those of an expert side by side.
        numbers, order = chosen.flatten().sort(stable=True)
        numbers = numbers[numbers < len(self.up)]
        order = order[: len(numbers)]
        lines = rows[order // chosen.shape[1]]
        made = _multiply(self._up, lines, numbers, self.up[0].outputs, self.experts.up.bias)
        entering = self.experts.activate(made)
        made = self.experts.post_norm(
            _multiply(self._down, entering, numbers, self.down[0].outputs, self.experts.down.bias)
        )
        weighted = made * weights.flatten()[order][:, None]
        parts = weighted.new_zeros(chosen.numel(), made.shape[1])
        parts[order] = weighted
        # One rank after the other: so the sums of a row run in one order, however many rows there are.
        total = torch.zeros_like(parts[:: chosen.shape[1]])
        for rank in range(chosen.shape[1]):
            total += parts[rank :: chosen.shape[1]]
        return total.to(rows.dtype)


def _multiply(
    matrices: Sequence[MultiplyRows], lines: Tensor, numbers: Tensor, outputs: int, biases: Tensor | None
) -> Tensor:
    """Each line [lines, columns] times the matrix of its number, ascending, and that one's bias."""
    made = lines.new_empty(len(lines), outputs)
    start = 0
    for matrix, count in zip(matrices, torch.bincount(numbers, minlength=len(matrices)).tolist(), strict=True):
        if count:
            [made[start : start + count]] = matrix(lines[start : start + count])
            start += count
    return made if biases is None else made + biases[numbers]
