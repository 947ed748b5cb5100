"""Finds out what a norm computes, by asking it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.native.decoder import Norm, NoShape
from engine.native.same import same
from engine.native.trace import Normed

# The greatest epsilon that is looked for among a module's numbers.
_GREATEST = 1e-2


def find_norm(seen: Normed) -> Norm:
    """The norm of a module. Raises NoShape where it is none that is known."""
    module, width = seen.norm, seen.taken.shape[-1]
    # Rows of sizes at which epsilon counts, and at which it does not.
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, width, generator=generator) * torch.logspace(-5, 1, 8)[:, None] + 0.01
    with torch.inference_mode():
        made = module(rows[None])[0]
    for norm in _candidates(module, width):
        if same_rows(normalise(norm, rows), made) and same(normalise(norm, seen.taken), seen.made):
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
    if weight is None:
        return
    epsilons = sorted({value for value in vars(module).values() if isinstance(value, float) and 0 < value < _GREATEST})
    for epsilon, own in itertools.product(epsilons, (weight, 1 + weight)):
        yield Norm("root_mean_square", width, epsilon, own, bias)
        yield Norm("layer", width, epsilon, own, bias)


def _row(weight: Tensor | None, width: int) -> Tensor | None:
    if weight is None or weight.shape != (width,):
        return None
    return weight.detach().float().contiguous().clone()
