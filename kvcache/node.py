"""Nodes of the prefix tree, and the offloaded entries that cover their edges.

An edge may be covered by several entries; after a split, several nodes share one entry, each with its own slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.component import ComponentReferences, SavedTensors

TokenArray: TypeAlias = NDArray[np.int64]


class OffloadEntry:
    """Saved content of a token range of a path: `tokens` from position `start` on.

    content      saved tensors of each component; None: in the file only
    placeholder  of the content (kvcache/component.py); None: the file has not been read yet
    file         name of the file; None: in memory only
    nodes        nodes with a slice of the entry
    last_used    logical time of the last use
    """

    __slots__ = ("content", "file", "file_bytes", "last_used", "nodes", "placeholder", "start", "tokens")

    def __init__(self, start: int, tokens: TokenArray) -> None:
        self.start, self.tokens = start, tokens
        self.content: Sequence[SavedTensors] | None = None
        self.placeholder: ComponentReferences | None = None
        self.file: str | None = None
        self.file_bytes = self.last_used = 0
        self.nodes: set[Node] = set()

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the content in host memory."""
        return sum(tensor.nbytes for part in self.content or () for tensor in part.values())


@dataclass(frozen=True, slots=True)
class EntrySlice:
    """The tokens [start, stop) of an entry, counted from its start."""

    entry: OffloadEntry
    start: int
    stop: int


class Node:
    """A node with its edge: `tokens` from position `start` on, below `parent`. A root has no parent and no tokens.

    id                 of this node among all nodes of the tree since its start
    resident           `references` own the edge's content in cells; else the content is offloaded
    entry_slices       offloaded content from the start of the edge on; the whole edge unless the node is resident
    fixed_end          the edge is never extended: later tokens become a child
    resident_children  number of children that are resident
    last_used          logical time of the last use
    """

    __slots__ = (
        "children",
        "entry_slices",
        "fixed_end",
        "id",
        "last_used",
        "parent",
        "references",
        "resident",
        "resident_children",
        "salt",
        "start",
        "tokens",
    )

    def __init__(self, id: int, tokens: TokenArray, parent: Node | None, start: int, salt: bytes) -> None:
        self.id, self.tokens, self.parent, self.start, self.salt = id, tokens, parent, start, salt
        self.children: dict[int, Node] = {}
        self.references: ComponentReferences = []
        self.entry_slices: list[EntrySlice] = []
        self.resident = self.fixed_end = False
        self.last_used = self.resident_children = 0

    @property
    def stop(self) -> int:
        """The position after the edge."""
        return self.start + len(self.tokens)

    @property
    def offloaded_tokens(self) -> int:
        """Leading tokens of the edge with offloaded content."""
        return sum(part.stop - part.start for part in self.entry_slices)

    @property
    def start_and_references(self) -> tuple[int, ComponentReferences]:
        """The edge's start and the references of a resident node."""
        return self.start, self.references

    @property
    def written_slices(self) -> list[EntrySlice]:
        """The leading slices with a file."""
        missing = (index for index, part in enumerate(self.entry_slices) if part.entry.file is None)
        return self.entry_slices[: next(missing, len(self.entry_slices))]

    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def set_entry_slices(self, slices: Sequence[EntrySlice]) -> None:
        """Replace the slices; the caller removes entries without nodes."""
        for part in self.entry_slices:
            part.entry.nodes.discard(self)
        self.entry_slices = list(slices)
        for part in self.entry_slices:
            part.entry.nodes.add(self)


def split_slices(slices: Sequence[EntrySlice], length: int) -> tuple[list[EntrySlice], list[EntrySlice]]:
    """The slices of an edge's first `length` tokens, and of the rest."""
    upper, lower, begin = [], [], 0
    for part in slices:
        middle = min(max(length - begin, 0), part.stop - part.start)
        if middle:
            upper.append(EntrySlice(part.entry, part.start, part.start + middle))
        if part.start + middle < part.stop:
            lower.append(EntrySlice(part.entry, part.start + middle, part.stop))
        begin += part.stop - part.start
    return upper, lower
