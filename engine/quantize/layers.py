"""What stands in a model where linear layers stood: the same function of rows, with quantised weights."""

from __future__ import annotations

from torch import Tensor, nn

from engine.kernels.linear import MultiplyRows
from engine.kernels.packing import PackedMatrix
from engine.quantize.plan import LinearLayer


class SharedInputGroup:
    """Layers that a model gives the same rows, one right after the other, such as those of query, key and value.

    The first that is asked computes for all, so that the rows are quantised once. What each gets is what it would get
    alone, bit for bit. Belongs to the engine thread.
    """

    def __init__(self, multiply: MultiplyRows) -> None:
        """`multiply` computes the products of rows and all the layers' matrices, in order."""
        self._multiply = multiply
        self._rows: Tensor | None = None
        self._products: dict[int, Tensor] = {}

    def product(self, number: int, rows: Tensor) -> Tensor:
        """The product [..., outputs] of rows [..., columns] and the matrix of a number."""
        # The very tensor: held here until all have asked, so that no other can be taken for it.
        if rows is not self._rows or number not in self._products:
            flat = rows.reshape(-1, rows.shape[-1])
            self._rows = rows
            self._products = dict(enumerate(self._multiply(flat)))
        product = self._products.pop(number)
        if not self._products:
            self._rows = None
        return product.view(*rows.shape[:-1], product.shape[-1])


class QuantizedLinear(nn.Module):
    """One of some siblings: a linear layer whose weights are codes and scales (engine/kernels/packing.py)."""

    def __init__(self, siblings: SharedInputGroup, number: int, packed: PackedMatrix, layer: LinearLayer) -> None:
        """`layer` is what it stands for, of which it takes the bias."""
        super().__init__()
        self._group, self._number = siblings, number
        self.in_features, self.out_features = packed.columns, packed.outputs
        # Both are shared with the siblings; here they are seen by whoever asks what a model takes.
        self.register_buffer("codes", packed.codes, persistent=False)
        self.register_buffer("scales", packed.scales, persistent=False)
        # Some models ask for the type of the weights, to bring rows to it.
        self.register_buffer("weight", layer.weight.new_empty(0), persistent=False)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias, requires_grad=False)

    @property
    def weights(self) -> int:
        """How many there are."""
        return self.in_features * self.out_features

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [..., in_features] to [..., out_features]."""
        product = self._group.product(self._number, rows)
        return product if self.bias is None else product + self.bias
