"""Computes a bfloat16 model in float32: the reference for the native step at load."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from engine.model import hooks

# Weights converted at once: the memory plan has no room for float32 copies of whole matrices.
_WEIGHTS_AT_ONCE = 2**22
# Functions that return a part of a weight, or none of its numbers.
_PARTS = {functional.embedding, Tensor.__getitem__, Tensor.numel, Tensor.dim, Tensor.size}


class Float32Mode(TorchFunctionMode):
    """Inside the block, torch functions see the bfloat16 parameters and buffers of a model as float32.

    The weights are converted at each use: exact, too slow to serve, and with almost no memory.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        latents = [(projection.keys, projection.values) for projection in hooks.latent_projections(model)]
        tensors = itertools.chain(model.parameters(), model.buffers(), *latents)
        self._converted = {id(tensor) for tensor in tensors if tensor.dtype == torch.bfloat16}
        # One buffer for all products: page faults of new memory take longer than the product.
        self._scratch = torch.empty(_WEIGHTS_AT_ONCE, device=next(model.parameters()).device)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of each of its functions."""
        named = kwargs or {}
        if func is functional.linear and self._is_converted(args[1]):
            return self._linear(*args, **named)
        if func in _PARTS or getattr(func, "__name__", "") == "__get__":
            return self._convert_part(func, args, named)
        return func(*map(self._convert, args), **{name: self._convert(value) for name, value in named.items()})

    def _convert_part(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The part of a weight is converted, not the whole weight; its dtype appears as float32."""
        part = func(*args, **named)
        if not any(self._is_converted(argument) for argument in args):
            return part
        if isinstance(part, torch.dtype):
            return torch.float32
        return part.float() if isinstance(part, Tensor) else part

    def _linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """functional.linear, with some outputs at a time."""
        parts: tuple[Tensor, ...] = torch.split(weight, max(_WEIGHTS_AT_ONCE // weight.shape[1], 1))
        product = torch.cat([functional.linear(rows, self._to_float32(part)) for part in parts], -1)
        return product if bias is None else product + bias.float()

    def _to_float32(self, part: Tensor) -> Tensor:
        """Rows of a weight in float32, valid until the next call."""
        if part.numel() > _WEIGHTS_AT_ONCE:
            return part.float()
        return self._scratch[: part.numel()].view(part.shape).copy_(part)

    def _is_converted(self, value: object) -> bool:
        return id(value) in self._converted

    def _convert(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self._convert, value))
        return value.float() if self._is_converted(value) else value
