"""One node of the prefix tree: the tokens of its edge, what is held of them in cells, and what lies on the shelf.

What is saved of a path is an entry of the shelf. An edge may lie there in several pieces, and where an edge was split
later, nodes share an entry: each has its own slice of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.component import SavedTensors

TokenArray: TypeAlias = NDArray[np.int64]
# What the components hold of one stretch of tokens, each in its own way.
ComponentReferences: TypeAlias = list[Any]


class OffloadEntry:
    """A saved stretch of a path: `tokens` from position `start` on.

    content  what each component saved, while it is in memory
    placeholder  of what was saved (kvcache/component.py); None as long as nobody has looked into the file
    file     the name of the file that holds it, besides the memory or alone
    nodes    those whose edges it covers
    last_used     when it was wanted last; larger is later
    """

    __slots__ = ("content", "file", "file_bytes", "nodes", "placeholder", "start", "tokens", "last_used")

    def __init__(self, start: int, tokens: TokenArray) -> None:
        self.start, self.tokens = start, tokens
        self.content: Sequence[SavedTensors] | None = None
        self.placeholder: ComponentReferences | None = None
        self.file: str | None = None
        self.file_bytes = self.last_used = 0
        self.nodes: set[Node] = set()

    @property
    def stop(self) -> int:
        """The position behind the stretch."""
        return self.start + len(self.tokens)

    @property
    def memory_bytes(self) -> int:
        """What the content takes in memory."""
        return sum(tensor.nbytes for part in self.content or () for tensor in part.values())


@dataclass(frozen=True, slots=True)
class EntrySlice:
    """The tokens [start, stop) of an entry, counted from its start."""

    entry: OffloadEntry
    start: int
    stop: int


class Node:
    """An edge that begins at position `start` below `parent`; the root of a tree has no parent and no tokens.

    resident  whether `references` has what each component holds of the edge; else it lies on the shelf alone
    entry_slices    of entries that cover the edge's tokens from its start on: all of them, unless it is resident
    fixed_end    the edge ends here for good: what follows becomes a child
    resident_children      how many of the children are resident
    last_used      when it was wanted last; larger is later
    """

    __slots__ = (
        "children",
        "references",
        "parent",
        "entry_slices",
        "resident",
        "salt",
        "fixed_end",
        "start",
        "tokens",
        "last_used",
        "resident_children",
    )

    def __init__(self, tokens: TokenArray, parent: Node | None, start: int, salt: bytes) -> None:
        self.tokens, self.parent, self.start, self.salt = tokens, parent, start, salt
        self.children: dict[int, Node] = {}
        self.references: ComponentReferences = []
        self.entry_slices: list[EntrySlice] = []
        self.resident = self.fixed_end = False
        self.last_used = self.resident_children = 0

    @property
    def stop(self) -> int:
        """The position behind the edge."""
        return self.start + len(self.tokens)

    @property
    def offloaded_tokens(self) -> int:
        """Tokens of the edge that lie on the shelf."""
        return sum(piece.stop - piece.start for piece in self.entry_slices)

    @property
    def start_and_references(self) -> tuple[int, ComponentReferences]:
        """What a resident node holds, and where that begins."""
        return self.start, self.references

    @property
    def written_slices(self) -> list[EntrySlice]:
        """The first pieces of the edge, as far as they are in files."""
        missing = (at for at, piece in enumerate(self.entry_slices) if piece.entry.file is None)
        return self.entry_slices[: next(missing, len(self.entry_slices))]

    def path(self) -> list[Node]:
        """The nodes from the one below the root to this one."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def set_entry_slices(self, pieces: Sequence[EntrySlice]) -> None:
        """Replace the pieces; entries that no node needs any more are the caller's to drop."""
        for piece in self.entry_slices:
            piece.entry.nodes.discard(self)
        self.entry_slices = list(pieces)
        for piece in self.entry_slices:
            piece.entry.nodes.add(self)


def split_slices(pieces: Sequence[EntrySlice], at: int) -> tuple[list[EntrySlice], list[EntrySlice]]:
    """The pieces of an edge's first `at` tokens, and the others."""
    upper, lower, begin = [], [], 0
    for piece in pieces:
        middle = min(max(at - begin, 0), piece.stop - piece.start)
        if middle:
            upper.append(EntrySlice(piece.entry, piece.start, piece.start + middle))
        if piece.start + middle < piece.stop:
            lower.append(EntrySlice(piece.entry, piece.start + middle, piece.stop))
        begin += piece.stop - piece.start
    return upper, lower
