"""A token-exact radix tree with least-recently-used order.

The tree owns its nodes, their resident and offloaded content, and the LRU order. Insertion, eviction and loading are
in kvcache/prefix.py.

Invariants: edges of siblings differ in their first token; the references of a resident node, and the entry slices of
any other node, cover exactly its edge; no resident node is below one that is not; a node was used later than its
children, so the least recently used resident node has no resident child.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from kvcache.component import CacheComponents, ComponentReferences
from kvcache.node import Node, OffloadEntry, TokenArray, split_slices
from kvcache.offload import OffloadConfig, OffloadTier

# Nodes in the order of their last use, least recently used first.
LruOrder: TypeAlias = OrderedDict[Node, None]


class RadixTree:
    """Nodes by tokens, with one tree for each salt. Owned by the prefix tree.

    token_bytes  upper bound of one token's content
    """

    def __init__(self, components: CacheComponents, offload: OffloadConfig, *, token_bytes: int) -> None:
        self._components = components
        self.roots: dict[bytes, Node] = {}
        self.lru: LruOrder = OrderedDict()
        # By component, the resident nodes that `trim` can reduce.
        self.trimmable: tuple[LruOrder, ...] = tuple(OrderedDict() for _ in components)
        self.node_count = 0
        self._ids = itertools.count(1)
        self.offload = OffloadTier(offload, self._components, token_bytes=token_bytes, on_lost=self._drop_lost_entry)

    def match(self, tokens: TokenArray, salt: bytes) -> tuple[list[Node], int]:
        """The nodes along the tokens, and the matched length; all nodes but the last match their whole edge."""
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
        """The node that ends at `depth`: the root, the last node of a matched path, or its upper part after a split."""
        if not path:
            return self.roots.setdefault(salt, self._make_node(np.empty(0, dtype=np.int64), None, 0, salt))
        if depth == path[-1].stop:
            return path[-1]
        upper = self.split(path[-1], depth - path[-1].start)
        upper.fixed_end = True
        return upper

    def add_tokens(self, above: Node, tokens: TokenArray) -> Node:
        """Add tokens after `above`: to its own edge if it is a leaf without a fixed end, else as a new child.

        Returns the node that ends at the last token.
        """
        if above.parent is not None and not above.children and not above.fixed_end:
            above.tokens = np.concatenate((above.tokens, tokens))
            return above
        child = self._make_node(tokens, above, above.stop, above.salt)
        above.children[int(tokens[0])] = child
        self.node_count += 1
        return child

    def split(self, node: Node, length: int) -> Node:
        """Split a node's edge; the returned upper part takes the node's place in the tree."""
        assert node.parent is not None, "a root has no edge"
        upper = self._make_node(node.tokens[:length], node.parent, node.start, node.salt)
        upper.last_used, upper.resident, upper.resident_children = node.last_used, node.resident, int(node.resident)
        node.parent.children[int(node.tokens[0])] = upper
        upper.children[int(node.tokens[length])] = node
        if node.resident:
            upper.references = self._components.slice(node.references, 0, length)
            node.references = self._components.slice(node.references, length, len(node.tokens))
        node.tokens, node.parent, node.start = node.tokens[length:], upper, node.start + length
        self.node_count += 1
        upper_slices, lower_slices = split_slices(node.entry_slices, length)
        upper.set_entry_slices(upper_slices)
        self.offload.set_entry_slices(node, lower_slices)
        self.offload.track_unwritten(upper)
        for part in (node, upper):
            if part.resident:
                self.add_to_lru(part)
        return upper

    def make_resident(self, node: Node, references: ComponentReferences) -> None:
        """Give a node content in cells; slices without a file are dropped."""
        assert node.parent is not None, "a root has no edge"
        node.references, node.resident = references, True
        node.parent.resident_children += 1
        self.offload.set_entry_slices(node, node.written_slices)
        self.add_to_lru(node)

    def add_to_lru(self, node: Node) -> None:
        """Add a resident node to the LRU orders that apply to its content."""
        self.lru[node] = None
        for component, references, trimmable in zip(self._components, node.references, self.trimmable, strict=True):
            if component.can_trim(references, node.start):
                trimmable[node] = None
            else:
                trimmable.pop(node, None)

    def take_references(self, node: Node) -> ComponentReferences:
        """Remove a node's content in cells from the tree; the caller releases the returned references."""
        assert node.parent is not None, "a root has no edge"
        references, node.references, node.resident = node.references, [], False
        node.parent.resident_children -= 1
        for order in (self.lru, *self.trimmable):
            order.pop(node, None)
        return references

    def touch(self, path: Sequence[Node]) -> None:
        """Mark a path as used; upper nodes count as used after lower ones."""
        for node in reversed(path):
            self.offload.touch(node)
            for order in (self.lru, *self.trimmable):
                if node in order:
                    order.move_to_end(node)

    def prune(self, node: Node) -> None:
        """Remove the tokens of a non-resident node without offloaded content, and all nodes below them."""
        offloaded = node.offloaded_tokens
        if offloaded == len(node.tokens):
            return
        removed = list(node.children.values())
        node.children.clear()
        if offloaded:
            node.tokens = node.tokens[:offloaded]
            self.offload.track_unwritten(node)
        else:
            self._detach(node)
            removed.append(node)
        for descendant in removed:
            removed.extend(descendant.children.values())
            descendant.parent = None
            self.node_count -= 1
            self.offload.set_entry_slices(descendant, [])

    def remove_salt(self, salt: bytes) -> None:
        """Remove all nodes of a salt, with their content in cells, memory and files."""
        root = self.roots.pop(salt, None)
        nodes = [] if root is None else [*root.children.values()]
        for node in nodes:
            nodes.extend(node.children.values())
        # Children first: the entries of files refer to the prefix of their path.
        for node in reversed(nodes):
            if node.resident:
                self._components.release(self.take_references(node))
            node.parent = None
            self.offload.set_entry_slices(node, [])
        self.node_count -= len(nodes)

    def recent_nodes(self, salt: bytes, limit: int) -> list[Node]:
        """Up to `limit` resident nodes of a salt, most recently used first: a node stands before its children."""
        return list(itertools.islice((node for node in reversed(self.lru) if node.salt == salt), limit))

    def _make_node(self, tokens: TokenArray, parent: Node | None, start: int, salt: bytes) -> Node:
        return Node(next(self._ids), tokens, parent, start, salt)

    def _detach(self, node: Node) -> None:
        """Remove a node from its parent, and a root without other children from the tree."""
        parent = node.parent
        assert parent is not None, "a root has no edge"
        del parent.children[int(node.tokens[0])]
        if parent.parent is None and not parent.children:
            del self.roots[parent.salt]

    def _drop_lost_entry(self, entry: OffloadEntry) -> None:
        """Remove the slices of an entry without content; callback of the offload tier."""
        while entry.nodes:
            node = next(iter(entry.nodes))
            entries = [part.entry for part in node.entry_slices]
            self.offload.set_entry_slices(node, node.entry_slices[: entries.index(entry)])
            if not node.resident:
                self.prune(node)
