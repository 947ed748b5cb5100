"""Finds out what is done with what a layer's inner matrices make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor
from torch.nn import functional

from engine.native.comparison import is_close, relative_difference
from engine.native.decoder import Activation, ColumnOffset, GatedMlp, UnsupportedArchitecture
from engine.native.trace import TracedLinear
from engine.native.trace_reader import TraceReader

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu_squared": lambda rows: functional.relu(rows).square(),
}


def find_gated(walk: TraceReader, rows: Tensor) -> tuple[GatedMlp, Tensor]:
    """The matrices that rows go through next, and what they make. Raises UnsupportedArchitecture."""
    inner = walk.read_linears(rows)
    if not 1 <= len(inner) <= 2:
        raise UnsupportedArchitecture("the second half of its layers is not of one matrix or two, and one more")
    taken = walk.next_input()
    gate, up, activation = _activation(inner, taken)
    down = walk.read_linear("a layer's last matrix", taken)
    return GatedMlp(tuple(matrix.linear for matrix in inner), gate, up, activation, down.linear), down.output


def _activation(inner: Sequence[TracedLinear], taken: Tensor) -> tuple[ColumnOffset, ColumnOffset | None, Activation]:
    """The columns and the activation with the smallest error: next to outliers gelu and its approximation are close."""
    found: dict[tuple[ColumnOffset, ColumnOffset | None, Activation], Tensor] = {}
    for gate, up in _places(inner, taken.shape[1]):
        for name, activate in ACTIVATIONS.items():
            made = activate(_columns(inner, gate, taken.shape[1]))
            found[gate, up, name] = made if up is None else made * _columns(inner, up, taken.shape[1])
    best = min(found, key=lambda own: relative_difference(found[own], taken), default=None)
    if best is None or not is_close(found[best], taken):
        raise UnsupportedArchitecture("its layers activate in another way")
    return best


def _places(inner: Sequence[TracedLinear], width: int) -> Iterator[tuple[ColumnOffset, ColumnOffset | None]]:
    """Where the activated columns may lie, and those they are multiplied by."""
    widths = [matrix.output.shape[1] for matrix in inner]
    if widths == [width]:
        yield ColumnOffset(0, 0), None
    if widths == [2 * width]:
        yield ColumnOffset(0, 0), ColumnOffset(0, width)
        yield ColumnOffset(0, width), ColumnOffset(0, 0)
    if widths == [width, width]:
        yield ColumnOffset(0, 0), ColumnOffset(1, 0)
        yield ColumnOffset(1, 0), ColumnOffset(0, 0)


def _columns(inner: Sequence[TracedLinear], place: ColumnOffset, width: int) -> Tensor:
    return inner[place.matrix].output[:, place.offset : place.offset + width]
