"""The quantised replacement of an embedding table."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from engine.kernels.device_products import DeviceProducts, TorchProducts
from engine.kernels.linear import PrepareMatrices
from engine.kernels.packing import PackedMatrix


class QuantizedEmbedding(nn.Module):
    """An embedding with quantised weights: the rows of a call are dequantised.

    dtype  of the original weights, to which the rows are rounded
    """

    def __init__(self, original: nn.Embedding, packed: PackedMatrix, prepare: PrepareMatrices) -> None:
        """`original` computes from the rows, for example their scale; its weights are freed."""
        super().__init__()
        products = prepare if isinstance(prepare, DeviceProducts) else TorchProducts(packed.codes.device)
        self._read = products.outputs(packed)
        self.original, self.packed, self.dtype = original, packed, original.weight.dtype
        # A matrix may be shared with the output layer; buffers make it visible to memory statistics.
        self.register_buffer("codes", packed.codes, persistent=False)
        self.register_buffer("scales", packed.scales, persistent=False)
        original.weight = nn.Parameter(original.weight.new_empty(0, packed.columns), requires_grad=False)
        # Of gradients only, and beyond the table of a call.
        original.padding_idx = None

    @property
    def weight(self) -> Tensor:
        """Empty, in the dtype and on the device of the weights."""
        return self.original.weight

    @property
    def weights(self) -> int:
        """Number of quantised weights."""
        return self.packed.outputs * self.packed.columns

    def rows(self, tokens: Tensor) -> Tensor:
        """The weights [tokens, width] of tokens [tokens]."""
        weights = self._read(tokens).to(self.dtype)
        # Within Float32Mode the empty weight is float32.
        return weights.to(self.weight.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] to [..., width]."""
        places = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
        embeddings: Tensor = functional_call(self.original, {"weight": self.rows(tokens.flatten())}, (places,))
        return embeddings
