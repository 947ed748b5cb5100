"""Finds out what a norm computes, by asking it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.native.decoder import Norm, NoShape
from engine.native.same import same

# The greatest epsilon that is looked for among a module's numbers, and those that norms have without saying so.
_GREATEST = 1e-2
_USUAL = (1e-5, 1e-6, 1e-8, torch.finfo(torch.float32).eps)


def find_norm(module: nn.Module, taken: Tensor, made: Tensor) -> Norm:
    """The norm of a module that made rows [rows, width] of others. Raises NoShape where it is none that is known."""
    width = taken.shape[-1]
    # Rows of sizes at which epsilon counts, and at which it does not.
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, width, generator=generator) * torch.logspace(-5, 1, 8)[:, None] + 0.01
    known = [norm for norm in _candidates(module, width) if same(normalise(norm, taken), made)]
    if known:
        with torch.inference_mode():
            answer = module(rows[None])[0]
        for norm in known:
            if same_rows(normalise(norm, rows), answer):
                return norm
    raise NoShape(f"it has layers of the kind {type(module).__name__}")


def same_rows(expected: Tensor, actual: Tensor) -> bool:
    """Whether each row is the same: they are of very different sizes."""
    return all(
        same(one / one.abs().max(), other / one.abs().max()) for one, other in zip(expected, actual, strict=True)
    )


def normalise(norm: Norm, rows: Tensor) -> Tensor:
    """What the norm makes of rows [..., width]."""
    if norm.kind == "none":
        return rows
    middle = rows.mean(-1, keepdim=True) if norm.kind == "layer" else 0.0
    apart = rows - middle
    made = apart * torch.rsqrt(apart.square().mean(-1, keepdim=True) + norm.epsilon)
    made = made if norm.weight is None else made * norm.weight
    return made if norm.bias is None else made + norm.bias


def _candidates(module: nn.Module, width: int) -> Iterator[Norm]:
    """What a module may be by its numbers."""
    weight, bias = (_row(getattr(module, name, None), width) for name in ("weight", "bias"))
    own = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < _GREATEST}
    weights = (None,) if weight is None else (weight, 1 + weight)
    for epsilon, factor in itertools.product(sorted(own) or _USUAL, weights):
        yield Norm("root_mean_square", width, epsilon, factor, bias)
        yield Norm("layer", width, epsilon, factor, bias)


def _row(weight: object, width: int) -> Tensor | None:
    if not isinstance(weight, Tensor) or weight.shape != (width,):
        return None
    return weight.detach().float().contiguous().clone()
