"""Counts of a cache at one moment, without any content: the cells of a pool, and the shape of the prefix tree."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CellCounts:
    """The cells of one pool by their use.

    used    by slots
    shared  of `used`: by more than one slot
    cached  by the prefix tree alone: evicted for running sequences
    """

    total: int
    used: int
    shared: int
    cached: int


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A resident node of the prefix tree: the tokens [start, start + length) of every sequence below it.

    parent  the id of the node above; None: the node is below the root
    slots   that use its cells
    """

    id: int
    parent: int | None
    start: int
    length: int
    slots: tuple[int, ...]
