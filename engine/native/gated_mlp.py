"""Finds a dense MLP in a trace: its matrices and its activation."""

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


def find_gated_mlp(reader: TraceReader, rows: Tensor) -> tuple[GatedMlp, Tensor]:
    """The MLP with the input `rows`, and its output. Raises UnsupportedArchitecture."""
    inner = reader.read_linears(rows)
    if not 1 <= len(inner) <= 2:
        raise UnsupportedArchitecture("its MLP does not have one or two inner matrices and a down matrix")
    activated = reader.next_input()
    gate, up, activation = _find_activation(inner, activated)
    down = reader.read_linear("the down matrix of the MLP", activated)
    return GatedMlp(tuple(projection.linear for projection in inner), gate, up, activation, down.linear), down.output


def _find_activation(
    inner: Sequence[TracedLinear], activated: Tensor
) -> tuple[ColumnOffset, ColumnOffset | None, Activation]:
    """The columns and the activation with the smallest error: for large inputs gelu and its approximation are close."""
    outputs: dict[tuple[ColumnOffset, ColumnOffset | None, Activation], Tensor] = {}
    width = activated.shape[1]
    for gate, up in _layouts(inner, width):
        for name, activate in ACTIVATIONS.items():
            output = activate(_columns(inner, gate, width))
            outputs[gate, up, name] = output if up is None else output * _columns(inner, up, width)
    best = min(outputs, key=lambda candidate: relative_difference(outputs[candidate], activated), default=None)
    if best is None or not is_close(outputs[best], activated):
        raise UnsupportedArchitecture("its MLP has another activation")
    return best


def _layouts(inner: Sequence[TracedLinear], width: int) -> Iterator[tuple[ColumnOffset, ColumnOffset | None]]:
    """Possible columns of gates and ups."""
    widths = [projection.output.shape[1] for projection in inner]
    if widths == [width]:
        yield ColumnOffset(0, 0), None
    if widths == [2 * width]:
        yield ColumnOffset(0, 0), ColumnOffset(0, width)
        yield ColumnOffset(0, width), ColumnOffset(0, 0)
    if widths == [width, width]:
        yield ColumnOffset(0, 0), ColumnOffset(1, 0)
        yield ColumnOffset(1, 0), ColumnOffset(0, 0)


def _columns(inner: Sequence[TracedLinear], start: ColumnOffset, width: int) -> Tensor:
    return inner[start.matrix].output[:, start.offset : start.offset + width]
