"""A model whose weights are bfloat16, computed in float32: what the native step is checked against at load."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# Weights that are widened at a time: float32 copies of whole matrices would need memory that nobody planned.
_AT_ONCE = 2**22
# Functions that take a part of a weight, or need none of its numbers.
_PARTS = {functional.embedding, Tensor.__getitem__, Tensor.numel, Tensor.dim, Tensor.size}


class Float32Mode(TorchFunctionMode):
    """Inside the block, what a model holds in bfloat16 is float32 to all that it computes.

    The weights stay as they are, and are widened for each use: far too slow to serve, exact, and almost without memory.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        held = itertools.chain(model.parameters(), model.buffers())
        self._own = {id(tensor) for tensor in held if tensor.dtype == torch.bfloat16}
        # Memory of its own for each product would cost more time, in page faults, than the product.
        self._scratch = torch.empty(_AT_ONCE)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What torch calls in place of each of its functions."""
        named = kwargs or {}
        if func is functional.linear and self._owns(args[1]):
            return self._multiply(*args, **named)
        if func in _PARTS or getattr(func, "__name__", "") == "__get__":
            return self._widen_what_is_taken(func, args, named)
        return func(*map(self._wide, args), **{name: self._wide(own) for name, own in named.items()})

    def _widen_what_is_taken(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Parts of a weight are taken first: the whole may be large. Its type is what it seems to be."""
        made = func(*args, **named)
        if not any(self._owns(one) for one in args):
            return made
        if isinstance(made, torch.dtype):
            return torch.float32
        return made.float() if isinstance(made, Tensor) else made

    def _multiply(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """functional.linear, some outputs at a time."""
        parts: tuple[Tensor, ...] = torch.split(weight, max(_AT_ONCE // weight.shape[1], 1))
        made = torch.cat([functional.linear(rows, self._widened(part)) for part in parts], -1)
        return made if bias is None else made + bias.float()

    def _widened(self, part: Tensor) -> Tensor:
        """Rows of a weight in float32, until the next call."""
        if part.numel() > _AT_ONCE:
            return part.float()
        return self._scratch[: part.numel()].view(part.shape).copy_(part)

    def _owns(self, one: object) -> bool:
        return id(one) in self._own

    def _wide(self, one: Any) -> Any:
        if isinstance(one, list | tuple):
            return type(one)(map(self._wide, one))
        return one.float() if self._owns(one) else one
