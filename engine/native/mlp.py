"""Finds the second half of a layer: its inner matrices, and what is done with what they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor
from torch.nn import functional

from engine.native.decoder import Activation, Columns, Mlp, NoShape
from engine.native.norm import find_norm
from engine.native.same import agree, same
from engine.native.trace import Event, Multiplied, Normed

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu_squared": lambda rows: functional.relu(rows).square(),
}


def find_mlp(first: Normed, output: Multiplied, events: Sequence[Event]) -> tuple[Mlp, Tensor]:
    """The second half, and what it adds to the states. Raises NoShape.

    first   the layer's first norm
    output  what the first half ends with
    events  behind that
    """
    own = [event for event in events if isinstance(event, Normed)]
    *inner, down = (event for event in events if isinstance(event, Multiplied))
    norm, parallel = _norm(first, output, own[0] if own else first)
    for matrix in inner:
        agree("a layer's second half", norm.made, matrix.taken)
    gate, up, activation = _activation(inner, down.taken)
    mlp = Mlp(
        norm=find_norm(norm),
        inner=tuple(matrix.linear for matrix in inner),
        gate=gate,
        up=up,
        activation=activation,
        down=down.linear,
        parallel=parallel,
    )
    return mlp, down.made


def _norm(first: Normed, output: Multiplied, norm: Normed) -> tuple[Normed, bool]:
    """The second half's norm, and whether it takes what the first one's does."""
    if same(first.taken, norm.taken):
        return norm, True
    agree("a layer's second norm", first.taken + output.made, norm.taken)
    return norm, False


def _activation(inner: Sequence[Multiplied], taken: Tensor) -> tuple[Columns, Columns | None, Activation]:
    for gate, up in _places(inner, taken.shape[1]):
        for name, activate in ACTIVATIONS.items():
            made = activate(_columns(inner, gate, taken.shape[1]))
            if same(made if up is None else made * _columns(inner, up, taken.shape[1]), taken):
                return gate, up, name
    raise NoShape("its layers activate in another way")


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
