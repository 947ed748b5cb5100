"""Finds the parameters of a norm by calling its module."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.native.comparison import is_close
from engine.native.decoder import Norm, UnsupportedArchitecture

# Float attributes of a module up to this may be its epsilon; the defaults are for modules without such attributes.
_MAX_EPSILON = 1e-2
_DEFAULT_EPSILONS = (1e-5, 1e-6, 1e-8, torch.finfo(torch.float32).eps)


def find_norm(module: nn.Module, inputs: Tensor, output: Tensor) -> Norm:
    """The norm of a module from one of its calls, rows [rows, width]. Raises UnsupportedArchitecture."""
    return _find(module, inputs, output, 1.0, lambda rows: module(rows[None])[0])


def find_gated_norm(module: nn.Module, inputs: Tensor, gate: Tensor, output: Tensor) -> Norm:
    """The norm of a module with the output norm(inputs) * silu(gate). Raises UnsupportedArchitecture."""

    def call(rows: Tensor) -> Tensor:
        ones = torch.ones_like(rows)
        gated: Tensor = module(rows, ones)
        return gated / functional.silu(ones)

    return _find(module, inputs, output, functional.silu(gate), call)


def find_group_norm(module: nn.Module, inputs: Tensor, gate: Tensor, output: Tensor, groups: Sequence[int]) -> Norm:
    """The norm of a module with the output norm(inputs * silu(gate)), over each of some groups of columns.

    The norm has the width of a group, and the weight of all columns. Raises UnsupportedArchitecture.

    groups  possible numbers of groups
    """
    width = inputs.shape[-1]
    rows = _probe_rows(width)
    ones = torch.ones_like(rows)
    with torch.inference_mode():
        probed = module(rows, ones)
    for norm, count in itertools.product(_candidates(module, width), groups):
        group_norm = replace(norm, width=width // count)
        if norm.kind != "root_mean_square" or norm.weight is None or norm.bias is not None:
            continue
        expected = normalise_groups(group_norm, inputs * functional.silu(gate))
        if is_close(expected, output) and rows_are_close(
            normalise_groups(group_norm, rows * functional.silu(ones)), probed
        ):
            return group_norm
    raise UnsupportedArchitecture(f"it has layers of the kind {type(module).__name__}")


def normalise_groups(norm: Norm, rows: Tensor) -> Tensor:
    """The norm of each group of columns of rows [rows, width]."""
    groups = torch.unflatten(rows, -1, (-1, norm.width))
    normed = normalise(replace(norm, weight=None), groups).flatten(-2)
    return normed if norm.weight is None else normed * norm.weight


def _probe_rows(width: int) -> Tensor:
    """Rows of different sizes: some so small that epsilon changes the output."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, width, generator=generator) * torch.logspace(-5, 1, 8)[:, None] + 0.01


def _find(
    module: nn.Module, inputs: Tensor, output: Tensor, factor: Tensor | float, call: Callable[[Tensor], Tensor]
) -> Norm:
    """The norm with the output norm(inputs) * factor; `call` computes the norm of other rows by the module."""
    width = inputs.shape[-1]
    rows = _probe_rows(width)
    candidates = [norm for norm in _candidates(module, width) if is_close(normalise(norm, inputs) * factor, output)]
    if candidates:
        with torch.inference_mode():
            probed = call(rows)
        for norm in candidates:
            if rows_are_close(normalise(norm, rows), probed):
                return norm
    raise UnsupportedArchitecture(f"it has layers of the kind {type(module).__name__}")


def rows_are_close(expected: Tensor, actual: Tensor) -> bool:
    """Whether each row is equal but for rounding relative to its own size."""
    return all(
        is_close(row / row.abs().max(), other / row.abs().max()) for row, other in zip(expected, actual, strict=True)
    )


def normalise(norm: Norm, rows: Tensor) -> Tensor:
    """The norm of rows [..., width]."""
    if norm.kind == "none":
        return rows
    mean = rows.mean(-1, keepdim=True) if norm.kind == "layer" else 0.0
    centred = rows - mean
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + norm.epsilon)
    normed = normed if norm.weight is None else normed * norm.weight
    return normed if norm.bias is None else normed + norm.bias


def _candidates(module: nn.Module, width: int) -> Iterator[Norm]:
    """The norms with the parameters of a module."""
    weight, bias = (_parameter(getattr(module, name, None), width) for name in ("weight", "bias"))
    epsilons = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < _MAX_EPSILON}
    weights = (None,) if weight is None else (weight, 1 + weight)
    for epsilon, factor in itertools.product(sorted(epsilons) or _DEFAULT_EPSILONS, weights):
        yield Norm("root_mean_square", width, epsilon, factor, bias)
        yield Norm("layer", width, epsilon, factor, bias)


def _parameter(weight: object, width: int) -> Tensor | None:
    if not isinstance(weight, Tensor) or weight.shape != (width,):
        return None
    return weight.detach().float().contiguous().clone()
