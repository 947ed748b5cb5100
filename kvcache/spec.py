"""The shape of a cache: key and value widths, attention range and rotation of each layer, and the spans of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

# One position, or an array of positions.
Position = TypeVar("Position", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class AttentionRange:
    """The earlier positions that a query attends to.

    full           all of them
    window, size   sliding window that includes the query, as in transformers: [p - size + 1, p]
    chunk, size    the query's own chunk: [p // size * size, p]
    """

    kind: Literal["full", "window", "chunk"] = "full"
    size: int = 0

    @property
    def shift_invariant(self) -> bool:
        """Whether the range depends on distances only, so that cached tokens may move to other positions."""
        return self.kind != "chunk"

    def limited_to(self, length: int) -> AttentionRange:
        """The same range for positions below `length`: full if no position is ever out of range."""
        return self if self.kind == "full" or self.size < length else AttentionRange()

    def oldest_visible(self, position: Position) -> Position:
        """The first position that a query at `position` attends to. It never decreases with the position."""
        if self.kind == "window":
            return (position - self.size + 1) * (position >= self.size)
        if self.kind == "chunk":
            return position // self.size * self.size
        return position * 0


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary position embedding of a layer's keys (RoFormer, arXiv 2104.09864, section 3.2).

    layout             column pairs: "half" (i, i + n) or "interleaved" (2i, 2i + 1)
    offset             the first of the 2n rotated columns
    inverse_frequency  n angles in radians a position, negative for the opposite direction;
                       empty where keys do not depend on the position (NoPE, ALiBi)
    """

    layout: Literal["half", "interleaved"] = "half"
    offset: int = 0
    inverse_frequency: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Cache geometry of one attention layer.

    rotation       None: cached keys cannot be moved to other positions and are recomputed
    latent_width   with latent attention (MLA) the leading key columns that are the values as well; else 0
    index_width    trailing value columns that are keys of an index of positions (sparse attention); else 0
    bidirectional  whether tokens of a range of `Span.bidirectional` attend to each other (Gemma 4: in window layers)
    """

    heads: int
    key_width: int
    value_width: int
    attention_range: AttentionRange = AttentionRange()
    rotation: Rotation | None = Rotation()
    latent_width: int = 0
    index_width: int = 0
    bidirectional: bool = True

    def limited_to(self, length: int) -> LayerSpec:
        """The same layer for positions below `length`."""
        return replace(self, attention_range=self.attention_range.limited_to(length))


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers with one geometry and the same visible positions; they share one cell table."""

    heads: int
    key_width: int
    value_width: int
    attention_range: AttentionRange
    layers: tuple[int, ...]
    rotations: tuple[Rotation | None, ...]
    latent_width: int = 0
    index_width: int = 0
    bidirectional: bool = True

    @property
    def key_parts(self) -> tuple[int, ...]:
        """Widths of the key parts that are quantised with separate scales: latent and rotary part, or the whole key."""
        if not self.latent_width:
            return (self.key_width,)
        return (self.latent_width, self.key_width - self.latent_width)

    @property
    def value_parts(self) -> tuple[int, ...]:
        """As `key_parts`: the value, and the key of an index; empty if the group stores neither."""
        return tuple(width for width in (self.value_width - self.index_width, self.index_width) if width)

    def pool_cells(self, cells: int, *, slots: int, max_batch_tokens: int) -> int:
        """Pool size of the group for a cache of `cells` tokens.

        Full attention needs a cell for each token. Windows and chunks need the visible cells of `slots` sequences plus
        the tokens of the largest batch, twice: the second half holds resume points in the prefix tree.
        """
        if self.attention_range.kind == "full":
            return cells
        return min(2 * (slots * (self.attention_range.size - 1) + max_batch_tokens), cells)

    @property
    def shiftable(self) -> bool:
        """Whether the keys of every layer can be moved to other positions."""
        return self.attention_range.shift_invariant and all(rotation is not None for rotation in self.rotations)

    def cell_bytes(self, dtype: torch.dtype) -> int:
        """Size of one cell in a storage format: one token's key and value in every layer."""
        scales = len(self.key_parts + self.value_parts) if dtype == torch.int8 else 0
        row = (self.key_width + self.value_width) * dtype.itemsize + scales * torch.float32.itemsize
        return len(self.layers) * self.heads * row


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one slot in a batch: positions [start, start + length).

    bidirectional  position ranges inside the span with bidirectional attention (image tokens in Gemma 3), in the layers
                   that have it (LayerSpec)
    draft_tokens   trailing draft tokens: the slot may keep any number of them
    long_factors   rotate with the long factors of LongRoPE
    """

    slot: int
    start: int
    length: int
    bidirectional: tuple[tuple[int, int], ...] = ()
    draft_tokens: int = 0
    long_factors: bool = False

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + self.length

    @property
    def state_ranges(self) -> tuple[tuple[int, int], ...]:
        """Adjacent position ranges that cover the span; a recurrent state is stored at the end of each."""
        stops = range(self.stop - self.draft_tokens, self.stop + 1)
        return tuple(zip((self.start, *stops), stops, strict=False))


def group_layers(layers: Sequence[LayerSpec]) -> tuple[GroupSpec, ...]:
    """Group the layers that can share a cell table, in the order of each group's first layer."""
    by_geometry: dict[LayerSpec, list[int]] = {}
    for index, layer in enumerate(layers):
        by_geometry.setdefault(replace(layer, rotation=None), []).append(index)
    return tuple(
        GroupSpec(
            heads=geometry.heads,
            key_width=geometry.key_width,
            value_width=geometry.value_width,
            attention_range=geometry.attention_range,
            layers=tuple(members),
            rotations=tuple(layers[index].rotation for index in members),
            latent_width=geometry.latent_width,
            index_width=geometry.index_width,
            bidirectional=geometry.bidirectional,
        )
        for geometry, members in by_geometry.items()
    )
