"""Finds out what is done with what a layer's inner matrices make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor
from torch.nn import functional

from engine.native.decoder import Activation, Columns, Gated, NoShape
from engine.native.same import difference, same
from engine.native.trace import Multiplied
from engine.native.walk import Walk

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu_squared": lambda rows: functional.relu(rows).square(),
}


def find_gated(walk: Walk, rows: Tensor) -> tuple[Gated, Tensor]:
    """The matrices that rows go through next, and what they make. Raises NoShape."""
    inner = walk.linears(rows)
    if not 1 <= len(inner) <= 2:
        raise NoShape("the second half of its layers is not of one matrix or two, and one more")
    taken = walk.next_taken()
    gate, up, activation = _activation(inner, taken)
    down = walk.linear("a layer's last matrix", taken)
    return Gated(tuple(matrix.linear for matrix in inner), gate, up, activation, down.linear), down.made


def _activation(inner: Sequence[Multiplied], taken: Tensor) -> tuple[Columns, Columns | None, Activation]:
    """The columns and the activation with the smallest error: next to outliers gelu and its approximation are close."""
    found: dict[tuple[Columns, Columns | None, Activation], Tensor] = {}
    for gate, up in _places(inner, taken.shape[1]):
        for name, activate in ACTIVATIONS.items():
            made = activate(_columns(inner, gate, taken.shape[1]))
            found[gate, up, name] = made if up is None else made * _columns(inner, up, taken.shape[1])
    best = min(found, key=lambda own: difference(found[own], taken), default=None)
    if best is None or not same(found[best], taken):
        raise NoShape("its layers activate in another way")
    return best


def _places(inner: Sequence[Multiplied], width: int) -> Iterator[tuple[Columns, Columns | None]]:
    """Where the activated columns may lie, and those they are multiplied by."""
    widths = [matrix.made.shape[1] for matrix in inner]
    if widths == [width]:
        yield Columns(0, 0), None
    if widths == [2 * width]:
        yield Columns(0, 0), Columns(0, width)
        yield Columns(0, width), Columns(0, 0)
    if widths == [width, width]:
        yield Columns(0, 0), Columns(1, 0)
        yield Columns(1, 0), Columns(0, 0)


def _columns(inner: Sequence[Multiplied], place: Columns, width: int) -> Tensor:
    return inner[place.matrix].made[:, place.offset : place.offset + width]
