"""The quantised replacement of linear layers."""

from __future__ import annotations

from torch import Tensor, nn

from engine.kernels.linear import MultiplyRows
from engine.kernels.packing import PackedMatrix
from engine.quantize.plan import LinearLayer


class SharedInputGroup:
    """Linear layers with the same input in consecutive calls, such as the query, key and value projections.

    The first call computes the products of all layers, so the input is quantised once. Each product is bit for bit that
    of a separate call. Belongs to the engine thread.
    """

    def __init__(self, multiply: MultiplyRows) -> None:
        """`multiply` computes the products of an input with all matrices of the group, in order."""
        self._multiply = multiply
        self._rows: Tensor | None = None
        self._products: dict[int, Tensor] = {}

    def product(self, number: int, rows: Tensor) -> Tensor:
        """The product [..., outputs] of the input [..., columns] with matrix `number` of the group."""
        # The tensor is compared by identity, and referenced until all products are read, so its id is not reused.
        if rows is not self._rows or number not in self._products:
            flat = rows.reshape(-1, rows.shape[-1])
            self._rows = rows
            self._products = dict(enumerate(self._multiply(flat)))
        product = self._products.pop(number)
        if not self._products:
            self._rows = None
        return product.view(*rows.shape[:-1], product.shape[-1])


class QuantizedLinear(nn.Module):
    """A linear layer with quantised weights, one of a SharedInputGroup."""

    def __init__(self, group: SharedInputGroup, number: int, packed: PackedMatrix, layer: LinearLayer) -> None:
        """`layer` is the original layer, which provides the bias."""
        super().__init__()
        self._group, self._number, self.packed = group, number, packed
        self.in_features, self.out_features = packed.columns, packed.outputs
        # Shared with the group; buffers here make them visible to memory statistics.
        self.register_buffer("codes", packed.codes, persistent=False)
        self.register_buffer("scales", packed.scales, persistent=False)
        # Some models read the dtype of the weight to cast their input.
        self.register_buffer("weight", layer.weight.new_empty(0), persistent=False)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias, requires_grad=False)

    @property
    def weights(self) -> int:
        """Number of quantised weights."""
        return self.in_features * self.out_features

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        product = self._group.product(self._number, rows)
        return product if self.bias is None else product + self.bias
