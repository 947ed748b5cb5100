"""The shape of a cache: what each layer stores, what it may look at, and how its keys follow a moved position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

# One position, or many.
Position = TypeVar("Position", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class AttentionRange:
    """Which earlier positions a query sees.

    full           all of them
    window, size   the last `size`, itself counted, as in transformers: [p - size + 1, p]
    chunk, size    those of its own chunk: [p // size * size, p]
    """

    kind: Literal["full", "window", "chunk"] = "full"
    size: int = 0

    @property
    def shift_invariant(self) -> bool:
        """Whether what a query sees depends on distances only, so that positions may shift."""
        return self.kind != "chunk"

    def limited_to(self, length: int) -> AttentionRange:
        """The same for positions below `length`: full where none of them is ever out of reach."""
        return self if self.kind == "full" or self.size < length else AttentionRange()

    def oldest_visible(self, position: Position) -> Position:
        """The first position that a query at `position` sees; no later query sees one before it either.

        Of an array of positions, each one's.
        """
        if self.kind == "window":
            return (position - self.size + 1) * (position >= self.size)
        if self.kind == "chunk":
            return position // self.size * self.size
        return position * 0


@dataclass(frozen=True, slots=True)
class Rotation:
    """How a layer's keys turn with their position (RoFormer, arXiv 2104.09864, section 3.2).

    layout             which columns form a pair: "half" (i, i + n) or "interleaved" (2i, 2i + 1)
    offset             the first of the 2n turned columns
    inverse_frequency  n angles in radians a position, negative where the model turns the other way;
                       empty where position does not touch the keys (NoPE, ALiBi)
    """

    layout: Literal["half", "interleaved"] = "half"
    offset: int = 0
    inverse_frequency: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer.

    rotation  None: its cells cannot be moved to other positions and must be recomputed
    latent_width    with latent attention, the first columns of a key that stand for the values too; else 0
    """

    heads: int
    key_width: int
    value_width: int
    attention_range: AttentionRange = AttentionRange()
    rotation: Rotation | None = Rotation()
    latent_width: int = 0

    def limited_to(self, length: int) -> LayerSpec:
        """The same for positions below `length`."""
        return replace(self, attention_range=self.attention_range.limited_to(length))


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers of one geometry and one reach: they share cell numbers, so one table serves them all."""

    heads: int
    key_width: int
    value_width: int
    attention_range: AttentionRange
    layers: tuple[int, ...]
    rotations: tuple[Rotation | None, ...]
    latent_width: int = 0

    @property
    def key_parts(self) -> tuple[int, ...]:
        """The widths of a key's parts, whose numbers differ in size: the latent and the rotated part, or all in one."""
        return (self.latent_width, self.key_width - self.latent_width) if self.latent_width else (self.key_width,)

    @property
    def value_parts(self) -> tuple[int, ...]:
        """The width of a value, if there are values."""
        return (self.value_width,) if self.value_width else ()

    def pool_cells(self, cells: int, *, slots: int, max_batch_tokens: int) -> int:
        """Cells that the group needs where sequences may hold `cells` tokens together.

        Layers that see everything need as many. Others need what `slots` sequences see, the most rows of a forward, and
        as much again for places to resume at: then every slot can always go on, and one alone whatever is remembered.
        """
        if self.attention_range.kind == "full":
            return cells
        return min(2 * (slots * (self.attention_range.size - 1) + max_batch_tokens), cells)

    @property
    def shiftable(self) -> bool:
        """Whether every layer's cells can be moved to other positions."""
        return self.attention_range.shift_invariant and all(rotation is not None for rotation in self.rotations)

    def cell_bytes(self, dtype: torch.dtype) -> int:
        """The size of one cell in a format (kvcache/kv_buffer.py): one token's key and value in every layer."""
        scales = len(self.key_parts + self.value_parts) if dtype == torch.int8 else 0
        row = (self.key_width + self.value_width) * dtype.itemsize + scales * torch.float32.itemsize
        return len(self.layers) * self.heads * row


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one slot in a forward: positions [start, start + length).

    bidirectional   ranges of positions, each wholly among the rows, whose tokens see those behind them in the range too; how
             far they see back is up to the layer (the tokens of an image in Gemma 3)
    draft_tokens  the last rows that are guesses: the slot may be left standing before each of them
    extended whether the rows are rotated as those of a sequence beyond the model's original length, wherever they are
    """

    slot: int
    start: int
    length: int
    bidirectional: tuple[tuple[int, int], ...] = ()
    draft_tokens: int = 0
    long_factors: bool = False

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.start + self.length

    @property
    def state_ranges(self) -> tuple[tuple[int, int], ...]:
        """The rows cut where the slot may be left standing: ranges of positions that follow each other."""
        cuts = range(self.stop - self.draft_tokens, self.stop + 1)
        return tuple(zip((self.start, *cuts), cuts, strict=False))


def group_layers(layers: Sequence[LayerSpec]) -> tuple[GroupSpec, ...]:
    """Gather layers that can share cell numbers, groups in the order of their first layer."""
    members: dict[tuple[int, int, int, AttentionRange, int], list[int]] = {}
    for index, layer in enumerate(layers):
        geometry = (layer.heads, layer.key_width, layer.value_width, layer.attention_range, layer.latent_width)
        members.setdefault(geometry, []).append(index)
    return tuple(
        GroupSpec(heads, key_width, value_width, reach, tuple(own), tuple(layers[at].rotation for at in own), latent)
        for (heads, key_width, value_width, reach, latent), own in members.items()
    )
