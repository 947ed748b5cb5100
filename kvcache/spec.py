"""The shape of a cache: what each layer stores, what it may look at, and how its keys follow a moved position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Reach:
    """Which earlier positions a query sees.

    full           all of them
    window, size   the last `size`, itself counted, as in transformers: [p - size + 1, p]
    chunk, size    those of its own chunk: [p // size * size, p]
    """

    kind: Literal["full", "window", "chunk"] = "full"
    size: int = 0

    @property
    def moves(self) -> bool:
        """Whether what a query sees depends on distances only, so that positions may shift."""
        return self.kind != "chunk"


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
    """One attention layer. `rotation` None: its cells cannot be moved to other positions and must be recomputed."""

    heads: int
    key_width: int
    value_width: int
    reach: Reach = Reach()
    rotation: Rotation | None = Rotation()


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers of one geometry and one reach: they share cell numbers, so one table serves them all."""

    heads: int
    key_width: int
    value_width: int
    reach: Reach
    layers: tuple[int, ...]
    rotations: tuple[Rotation | None, ...]

    @property
    def shiftable(self) -> bool:
        """Whether every layer's cells can be moved to other positions."""
        return self.reach.moves and all(rotation is not None for rotation in self.rotations)

    def cell_bytes(self, element_bytes: int) -> int:
        """The size of one cell: one token's key and value in every layer of the group."""
        return len(self.layers) * self.heads * (self.key_width + self.value_width) * element_bytes


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one slot in a forward: positions [start, start + length)."""

    slot: int
    start: int
    length: int

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.start + self.length


def group_layers(layers: Sequence[LayerSpec]) -> tuple[GroupSpec, ...]:
    """Gather layers that can share cell numbers, groups in the order of their first layer."""
    members: dict[tuple[int, int, int, Reach], list[int]] = {}
    for index, layer in enumerate(layers):
        members.setdefault((layer.heads, layer.key_width, layer.value_width, layer.reach), []).append(index)
    return tuple(
        GroupSpec(heads, key_width, value_width, reach, tuple(own), tuple(layers[index].rotation for index in own))
        for (heads, key_width, value_width, reach), own in members.items()
    )
