"""Finds out what a norm computes, by asking it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.native.comparison import is_close
from engine.native.decoder import Norm, UnsupportedArchitecture

# The greatest epsilon that is looked for among a module's numbers, and those that norms have without saying so.
_MAX_EPSILON = 1e-2
_DEFAULT_EPSILONS = (1e-5, 1e-6, 1e-8, torch.finfo(torch.float32).eps)


def find_norm(module: nn.Module, taken: Tensor, made: Tensor) -> Norm:
    """The norm of a module that made rows [rows, width] of others. Raises UnsupportedArchitecture where it is none that is known."""
    return _find(module, taken, made, 1.0, lambda rows: module(rows[None])[0])


def find_gated_norm(module: nn.Module, taken: Tensor, gate: Tensor, made: Tensor) -> Norm:
    """That of a module that multiplies what it makes by silu(gate). Raises UnsupportedArchitecture."""

    def ask(rows: Tensor) -> Tensor:
        ones = torch.ones_like(rows)
        answer: Tensor = module(rows, ones)
        return answer / functional.silu(ones)

    return _find(module, taken, made, functional.silu(gate), ask)


def find_group_norm(module: nn.Module, taken: Tensor, gate: Tensor, made: Tensor, groups: Sequence[int]) -> Norm:
    """That of a module whose rows are multiplied by silu(gate) first, of each of so many groups. Raises UnsupportedArchitecture.

    The norm's width is that of a group, its weight that of all.
    """
    width = taken.shape[-1]
    rows = _probe_rows(width)
    ones = torch.ones_like(rows)
    with torch.inference_mode():
        answer = module(rows, ones)
    for norm, count in itertools.product(_candidates(module, width), groups):
        own = replace(norm, width=width // count)
        if norm.kind != "root_mean_square" or norm.weight is None or norm.bias is not None:
            continue
        expected = normalise_groups(own, taken * functional.silu(gate))
        if is_close(expected, made) and rows_are_close(normalise_groups(own, rows * functional.silu(ones)), answer):
            return own
    raise UnsupportedArchitecture(f"it has layers of the kind {type(module).__name__}")


def normalise_groups(norm: Norm, rows: Tensor) -> Tensor:
    """What such a norm makes of rows [rows, width]."""
    groups = torch.unflatten(rows, -1, (-1, norm.width))
    made = normalise(replace(norm, weight=None), groups).flatten(-2)
    return made if norm.weight is None else made * norm.weight


def _probe_rows(width: int) -> Tensor:
    """Rows of sizes at which epsilon counts, and at which it does not."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, width, generator=generator) * torch.logspace(-5, 1, 8)[:, None] + 0.01


def _find(module: nn.Module, taken: Tensor, made: Tensor, by: Tensor | float, ask: Callable[[Tensor], Tensor]) -> Norm:
    """The norm that makes such rows, which are multiplied then; `ask` is the module without that."""
    width = taken.shape[-1]
    rows = _probe_rows(width)
    known = [norm for norm in _candidates(module, width) if is_close(normalise(norm, taken) * by, made)]
    if known:
        with torch.inference_mode():
            answer = ask(rows)
        for norm in known:
            if rows_are_close(normalise(norm, rows), answer):
                return norm
    raise UnsupportedArchitecture(f"it has layers of the kind {type(module).__name__}")


def rows_are_close(expected: Tensor, actual: Tensor) -> bool:
    """Whether each row is the same: they are of very different sizes."""
    return all(
        is_close(one / one.abs().max(), other / one.abs().max()) for one, other in zip(expected, actual, strict=True)
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
    own = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < _MAX_EPSILON}
    weights = (None,) if weight is None else (weight, 1 + weight)
    for epsilon, factor in itertools.product(sorted(own) or _DEFAULT_EPSILONS, weights):
        yield Norm("root_mean_square", width, epsilon, factor, bias)
        yield Norm("layer", width, epsilon, factor, bias)


def _row(weight: object, width: int) -> Tensor | None:
    if not isinstance(weight, Tensor) or weight.shape != (width,):
        return None
    return weight.detach().float().contiguous().clone()
