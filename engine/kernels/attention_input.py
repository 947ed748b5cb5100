"""The input of attention over KV cells, as every implementation takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from kvcache.forward import Segment
from kvcache.kv_buffer import LayerKV
from kvcache.row_forward import RowCells
from kvcache.spec import AttentionRange

# From (rows, before) to the bias of the last `rows` of `before + rows` positions, [heads, rows, before + rows].
ScoreBias: TypeAlias = Callable[[int, int], Tensor]


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """One layer's queries of a packed batch, and the cells that they attend to.

    query            [heads, rows, key_width]
    keys             of the layer, [key_heads, cells, key_width]; heads is a multiple of key_heads
    values           of the layer, [key_heads, cells, value_width]
    segments         the rows and the cells of each sequence; output rows of no segment are undefined
    attention_range  the earlier positions that a query attends to
    scale            factor of the products of queries and keys
    softcap          scores become softcap * tanh(score / softcap)
    sinks            [heads], scores that take part in the softmax without a value
    bias             added to the scaled scores
    """

    query: Tensor
    keys: LayerKV
    values: LayerKV
    segments: Sequence[Segment]
    attention_range: AttentionRange
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: ScoreBias | None = None


@dataclass(frozen=True, slots=True)
class RowAttentionInput:
    """One layer's queries of a batch with one token a sequence, and their cells as numbers on the device.

    The other fields are those of AttentionInput.
    """

    query: Tensor
    keys: LayerKV
    values: LayerKV
    cells: RowCells
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


# Computes the attention output of a packed batch, [rows, heads, value_width].
AttentionFunction: TypeAlias = Callable[[AttentionInput], Tensor]
