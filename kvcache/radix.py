"""A radix tree over tokens, exact to the token: its nodes, and the order in which they were wanted.

Owns which nodes there are, what each of them has in cells and on the shelf, and when it was used. What is remembered,
given up and brought back is up to kvcache/prefix.py.

Invariants: siblings' edges differ in their first token; a resident node's content covers exactly its edge, and so do
the pieces of one that is not; no resident node stands below one that is not; a node was used later than its children,
so of the resident nodes the one used longest ago has no resident child.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from kvcache.components import CacheComponents
from kvcache.node import ComponentReferences, Node, OffloadEntry, TokenArray, split_slices
from kvcache.offload import OffloadConfig, OffloadTier

# Nodes in the order of their last use, longest ago first.
LruOrder: TypeAlias = OrderedDict[Node, None]


class RadixTree:
    """Nodes by their tokens, a tree for each salt. Belongs to the prefix tree.

    token_bytes  that one token's content takes, at most
    """

    def __init__(self, components: CacheComponents, offload: OffloadConfig, *, token_bytes: int) -> None:
        self._components = components
        self.roots: dict[bytes, Node] = {}
        self.lru: LruOrder = OrderedDict()
        # Those of the resident nodes, by component, from which `thin` would release something.
        self.trimmable: tuple[LruOrder, ...] = tuple(OrderedDict() for _ in components)
        self.node_count = 0
        self.offload = OffloadTier(offload, self._components, token_bytes=token_bytes, on_lost=self._drop_lost_entry)

    def match(self, tokens: TokenArray, salt: bytes) -> tuple[list[Node], int]:
        """The nodes along the tokens, and how many of the tokens they match: all but the last node match whole."""
        path: list[Node] = []
        node, depth = self.roots.get(salt), 0
        while node is not None and depth < len(tokens):
            node = node.children.get(int(tokens[depth]))
            if node is None:
                break
            length = min(len(node.tokens), len(tokens) - depth)
            same = node.tokens[:length] == tokens[depth : depth + length]
            depth += length if same.all() else int(same.argmin())
            path.append(node)
            if depth < node.stop:
                break
        return path, depth

    def node_at_end(self, path: Sequence[Node], depth: int, salt: bytes) -> Node:
        """The node that ends where a path matches: its last one, split there for good if it goes on."""
        if not path:
            return self.roots.setdefault(salt, Node(np.empty(0, dtype=np.int64), None, 0, salt))
        if depth == path[-1].stop:
            return path[-1]
        upper = self.split(path[-1], depth - path[-1].start)
        upper.fixed_end = True
        return upper

    def add_tokens(self, above: Node, tokens: TokenArray) -> Node:
        """The node that takes tokens which follow `above`: itself, if it is a leaf and not sealed, else a new child."""
        if above.parent is not None and not above.children and not above.fixed_end:
            above.tokens = np.concatenate((above.tokens, tokens))
            return above
        child = Node(tokens, above, above.stop, above.salt)
        above.children[int(tokens[0])] = child
        self.node_count += 1
        return child

    def split(self, node: Node, at: int) -> Node:
        """Cut a node's edge in two; the upper part, which is returned, takes the node's place."""
        assert node.parent is not None, "a root has no edge"
        upper = Node(node.tokens[:at], node.parent, node.start, node.salt)
        upper.last_used, upper.resident, upper.resident_children = node.last_used, node.resident, int(node.resident)
        node.parent.children[int(node.tokens[0])] = upper
        upper.children[int(node.tokens[at])] = node
        if node.resident:
            upper.references = self._components.slice(node.references, 0, at)
            node.references = self._components.slice(node.references, at, len(node.tokens))
        node.tokens, node.parent, node.start = node.tokens[at:], upper, node.start + at
        self.node_count += 1
        over, under = split_slices(node.entry_slices, at)
        upper.set_entry_slices(over)
        self.offload.set_entry_slices(node, under)
        self.offload.track_unwritten(upper)
        for part in (node, upper):
            if part.resident:
                self.add_to_lru(part)
        return upper

    def make_resident(self, node: Node, references: ComponentReferences) -> None:
        """Give a node content in cells; what the shelf has of it in memory alone is not needed any more."""
        assert node.parent is not None, "a root has no edge"
        node.references, node.resident = references, True
        node.parent.resident_children += 1
        self.offload.set_entry_slices(node, node.written_slices)
        self.add_to_lru(node)

    def add_to_lru(self, node: Node) -> None:
        """Put a resident node in the orders where its content belongs."""
        self.lru[node] = None
        for component, held, thick in zip(self._components, node.references, self.trimmable, strict=True):
            if component.can_trim(held, node.start):
                thick[node] = None
            else:
                thick.pop(node, None)

    def take_references(self, node: Node) -> ComponentReferences:
        """Take a node's content from it; nothing is released."""
        assert node.parent is not None, "a root has no edge"
        held, node.references, node.resident = node.references, [], False
        node.parent.resident_children -= 1
        for order in (self.lru, *self.trimmable):
            order.pop(node, None)
        return held

    def touch(self, path: Sequence[Node]) -> None:
        """Note that a path is wanted; its upper nodes count as used after the lower ones."""
        for node in reversed(path):
            self.offload.touch(node)
            for order in (self.lru, *self.trimmable):
                if node in order:
                    order.move_to_end(node)

    def prune(self, node: Node) -> None:
        """Cut off what a node that is not resident does not have on the shelf, and all below that."""
        shelved = node.offloaded_tokens
        if shelved == len(node.tokens):
            return
        gone = list(node.children.values())
        node.children.clear()
        if shelved:
            node.tokens = node.tokens[:shelved]
            self.offload.track_unwritten(node)
        else:
            self._detach(node)
            gone.append(node)
        for each in gone:
            gone.extend(each.children.values())
            each.parent = None
            self.node_count -= 1
            self.offload.set_entry_slices(each, [])

    def _detach(self, node: Node) -> None:
        """Take a node from its parent, and a root from the tree that has nothing else."""
        parent = node.parent
        assert parent is not None, "a root has no edge"
        del parent.children[int(node.tokens[0])]
        if parent.parent is None and not parent.children:
            del self.roots[parent.salt]

    def _drop_lost_entry(self, entry: OffloadEntry) -> None:
        """Forget what an entry alone had; the shelf calls this."""
        while entry.nodes:
            node = next(iter(entry.nodes))
            entries = [piece.entry for piece in node.entry_slices]
            self.offload.set_entry_slices(node, node.entry_slices[: entries.index(entry)])
            if not node.resident:
                self.prune(node)
