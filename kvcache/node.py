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

from kvcache.component import Content

Tokens: TypeAlias = NDArray[np.int64]
# What the components hold of one stretch of tokens, each in its own way.
Holdings: TypeAlias = list[Any]


class ShelfEntry:
    """A saved stretch of a path: `tokens` from position `start` on.

    content  what each component saved, while it is in memory
    outline  of what was saved (kvcache/component.py); None as long as nobody has looked into the file
    file     the name of the file that holds it, besides the memory or alone
    nodes    those whose edges it covers
    used     when it was wanted last; larger is later
    """

    __slots__ = ("content", "file", "file_bytes", "nodes", "outline", "start", "tokens", "used")

    def __init__(self, start: int, tokens: Tokens) -> None:
        self.start, self.tokens = start, tokens
        self.content: Sequence[Content] | None = None
        self.outline: Holdings | None = None
        self.file: str | None = None
        self.file_bytes = self.used = 0
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
class Piece:
    """The tokens [start, stop) of an entry, counted from its start."""

    entry: ShelfEntry
    start: int
    stop: int


class Node:
    """An edge that begins at position `start` below `parent`; the root of a tree has no parent and no tokens.

    resident  whether `held` has what each component holds of the edge; else it lies on the shelf alone
    pieces    of entries that cover the edge's tokens from its start on: all of them, unless it is resident
    sealed    the edge ends here for good: what follows becomes a child
    warm      how many of the children are resident
    used      when it was wanted last; larger is later
    """

    __slots__ = (
        "children",
        "held",
        "parent",
        "pieces",
        "resident",
        "salt",
        "sealed",
        "start",
        "tokens",
        "used",
        "warm",
    )

    def __init__(self, tokens: Tokens, parent: Node | None, start: int, salt: bytes) -> None:
        self.tokens, self.parent, self.start, self.salt = tokens, parent, start, salt
        self.children: dict[int, Node] = {}
        self.held: Holdings = []
        self.pieces: list[Piece] = []
        self.resident = self.sealed = False
        self.used = self.warm = 0

    @property
    def stop(self) -> int:
        """The position behind the edge."""
        return self.start + len(self.tokens)

    @property
    def shelved(self) -> int:
        """Tokens of the edge that lie on the shelf."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def stretch(self) -> tuple[int, Holdings]:
        """What a resident node holds, and where that begins."""
        return self.start, self.held

    @property
    def filed(self) -> list[Piece]:
        """The first pieces of the edge, as far as they are in files."""
        missing = (at for at, piece in enumerate(self.pieces) if piece.entry.file is None)
        return self.pieces[: next(missing, len(self.pieces))]

    def path(self) -> list[Node]:
        """The nodes from the one below the root to this one."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def link(self, pieces: Sequence[Piece]) -> None:
        """Replace the pieces; entries that no node needs any more are the caller's to drop."""
        for piece in self.pieces:
            piece.entry.nodes.discard(self)
        self.pieces = list(pieces)
        for piece in self.pieces:
            piece.entry.nodes.add(self)


def cut(pieces: Sequence[Piece], at: int) -> tuple[list[Piece], list[Piece]]:
    """The pieces of an edge's first `at` tokens, and the others."""
    upper, lower, begin = [], [], 0
    for piece in pieces:
        middle = min(max(at - begin, 0), piece.stop - piece.start)
        if middle:
            upper.append(Piece(piece.entry, piece.start, piece.start + middle))
        if piece.start + middle < piece.stop:
            lower.append(Piece(piece.entry, piece.start + middle, piece.stop))
        begin += piece.stop - piece.start
    return upper, lower
