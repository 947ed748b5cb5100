"""Weights that stay in their files: dequantised in each call of their module, to hold few of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.gguf.sources import FileMatrix, Matrices
from engine.kernels.blocks import BlockReader

# Weights of a linear layer that are dequantised at once.
_WEIGHTS_AT_ONCE = 2**20


class DeferredWeights:
    """Parameters of a model with values inside calls of their modules only; outside they are NaN.

    Linear layers are dequantised in parts, embeddings by the rows of a call. Experts compute each token alone, and are
    the same code in all layers, but those of one layer take seconds: the first ones of a kind are dequantised once, the
    others add zeros, in every runner alike.
    """

    def __init__(
        self, model: nn.Module, sources: Mapping[str, Matrices], dtype: torch.dtype, reader: BlockReader
    ) -> None:
        """`sources` are those of the deferred parameters by name, each in types that `reader` dequantises."""
        self._dtype, self._reader = dtype, reader
        self._sources = {name: (model.get_parameter(name), source) for name, source in sources.items()}
        self._restore = list[Callable[[], object]]()
        # By kind, the first experts; whether their output has the shape of their first input.
        self._first_experts: dict[type[nn.Module], list[str]] = {}
        self._additive: dict[type[nn.Module], bool] = {}
        deferred = {id(parameter): name for name, (parameter, _) in self._sources.items()}
        for module in model.modules():
            names = [
                deferred[id(parameter)] for parameter in module.parameters(recurse=False) if id(parameter) in deferred
            ]
            if names:
                self._drop(names)
                self._defer(module, names)

    def close(self, unused: Collection[str] = ()) -> None:
        """Read all parameters but the `unused` ones, which stay without values."""
        for restore in self._restore:
            restore()
        self._restore.clear()
        self._drop([name for names in self._first_experts.values() for name in names])
        self._read([name for name in self._sources if name not in unused])
        self._sources.clear()

    def _defer(self, module: nn.Module, names: list[str]) -> None:
        [matrix, *others] = self._sources[names[0]][1].matrices
        if type(module) is nn.Linear and not others:
            # Parts of the weight in place of the whole, in the same module.
            self._replace_forward(module, partial(self._linear, module, matrix))
            return
        if others and type(module) in self._first_experts:
            self._replace_forward(module, partial(self._later_experts, module, names))
            return
        if others:
            self._first_experts[type(module)] = names
            handles = (
                module.register_forward_pre_hook(self._before_first_experts),
                module.register_forward_hook(self._after_first_experts),
            )
            self._restore += [handle.remove for handle in handles]
            return
        before: Callable[..., object] = partial(self._before_call, names)
        if isinstance(module, nn.Embedding):
            before = partial(self._before_embedding, names[0], matrix)
            self._restore.append(partial(setattr, module, "padding_idx", module.padding_idx))
            # Of gradients only, and beyond the table of a call.
            module.padding_idx = None
        handles = (
            module.register_forward_pre_hook(before),
            module.register_forward_hook(partial(self._after_call, names), always_call=True),
        )
        self._restore += [handle.remove for handle in handles]

    def _replace_forward(self, module: nn.Module, forward: Callable[..., object]) -> None:
        setattr(module, "forward", forward)  # noqa: B010
        self._restore.append(partial(module.__dict__.pop, "forward"))

    def _linear(self, module: nn.Linear, matrix: FileMatrix, rows: Tensor) -> Tensor:
        """The product of a linear layer."""
        # Allocated first: products of parts between their weights would fragment the memory (measured: 1 GiB).
        product = rows.new_empty(*rows.shape[:-1], matrix.shape[0])
        blocks, start = torch.from_numpy(matrix.blocks), 0
        for part in torch.split(blocks, max(_WEIGHTS_AT_ONCE // matrix.shape[1], 1)):
            outputs = slice(start, start := start + len(part))
            bias = None if module.bias is None else module.bias[outputs]
            product[..., outputs] = functional.linear(rows, self._values(part, matrix).to(rows.dtype), bias)
        return product

    def _before_embedding(self, name: str, matrix: FileMatrix, _: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        """The table of a call's tokens, and their places in it."""
        [tokens] = inputs
        with torch._C.DisableTorchFunction(), torch.inference_mode(mode=False):
            rows = torch.from_numpy(matrix.blocks[tokens.flatten().numpy()])
            self._sources[name][0].data = self._values(rows, matrix)
        return (torch.arange(tokens.numel()).view(tokens.shape),)

    def _before_call(self, names: list[str], *_: Any) -> None:
        self._read(names)

    def _after_call(self, names: list[str], *_: Any) -> None:
        self._drop(names)

    def _before_first_experts(self, module: nn.Module, _: object) -> None:
        if type(module) not in self._additive:
            self._read(self._first_experts[type(module)])

    def _after_first_experts(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        shapes = [value.shape for value in (*inputs[:1], output) if isinstance(value, Tensor)]
        self._additive[type(module)] = len(shapes) == 2 and shapes[0] == shapes[1]

    def _later_experts(self, module: nn.Module, names: list[str], rows: Tensor, *args: Any, **named: Any) -> Any:
        """Zeros, where experts of this kind add rows; else their output."""
        if self._additive.get(type(module)):
            return torch.zeros_like(rows)
        self._read(names)
        try:
            return type(module).forward(module, rows, *args, **named)
        finally:
            self._drop(names)

    def _values(self, blocks: Tensor, matrix: FileMatrix) -> Tensor:
        """The weights [outputs, columns] of blocks."""
        assert matrix.type is not None
        values = self._reader.dequantize(blocks, matrix.type)
        assert values is not None
        return values.to(self._dtype)

    def _read(self, names: list[str]) -> None:
        # Function modes (engine/native/float32_mode.py) would set the data of a converted copy.
        with torch._C.DisableTorchFunction(), torch.inference_mode(mode=False):
            for name in names:
                parameter, source = self._sources[name]
                parameter.data = source.read(self._dtype, self._reader)

    def _drop(self, names: list[str]) -> None:
        # See _read.
        with torch._C.DisableTorchFunction(), torch.inference_mode(mode=False):
            for name in names:
                parameter, source = self._sources[name]
                parameter.data = placeholder(source.shape, self._dtype)


def placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of one number, NaN, expanded to a shape."""
    return torch.full((), torch.nan, dtype=dtype).expand(shape)
