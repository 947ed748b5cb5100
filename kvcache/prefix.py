"""The prefix tree: what slots computed, kept under the tokens that it was computed from.

A radix tree over tokens, exact to the token. Each node owns references to the cells of its edge, in every component,
so content outlives its slot and is shared without copying. A slot that stands inside the tree may be extended from it
while others run; what they compute is put in as it grows. Trees with different salts never meet.

Invariants: siblings' edges differ in their first token; a node's held content covers exactly its edge; the tree never
writes a cell.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.component import Component

Tokens = NDArray[np.int64]
# What the components hold of one edge, each in its own way.
Holdings = list[Any]


class Node:
    """One edge: its tokens, what each component holds for them, and when it was last wanted."""

    __slots__ = ("children", "held", "parent", "tokens", "used")

    def __init__(self, tokens: Tokens, held: Holdings, parent: Node | None) -> None:
        self.tokens = tokens
        self.held = held
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.used = 0


class PrefixTree:
    """Content of former and running slots, found by its tokens. Belongs to the cache."""

    def __init__(self, components: Sequence[Component[Any]]) -> None:
        self._components = tuple(components)
        self._roots: dict[bytes, Node] = {}
        # Leaves by last use, with entries that have gone stale among them: those are passed over when they come up.
        self._leaves: list[tuple[int, int, Node]] = []
        self._clock = self._serial = 0
        self.nodes = 0

    def recall(self, slot: int, standing: int, tokens: Tokens, salt: bytes) -> int:
        """Extend a slot that stands at `standing` with the same tokens, as far as the tree reaches; the new length."""
        path = self._walk(tokens, salt)
        self._touch([node for node, _, _ in path])
        goal = self._reach(path, standing)
        for node, begin, _ in path:
            start, stop = max(standing - begin, 0), min(goal - begin, len(node.tokens))
            if start < stop:
                for component, part in zip(self._components, self._parts(node, start, stop), strict=True):
                    component.restore(slot, part)
                standing = begin + stop
        return standing

    def remember(self, slot: int, tokens: Tokens, salt: bytes) -> None:
        """Hold what the slot has for its first `len(tokens)` tokens; where the tree has them already, its own stays."""
        path = self._walk(tokens, salt)
        at = sum(matched for _, _, matched in path)
        if path and at < len(tokens) and path[-1][2] < len(path[-1][0].tokens):
            node, begin, matched = path[-1]
            path[-1] = (self._split(node, matched), begin, matched)
        if at < len(tokens):
            above = path[-1][0] if path else self._roots.setdefault(salt, Node(tokens[:0], [], None))
            held = [component.hold(slot, at, len(tokens)) for component in self._components]
            path.append((self._grow(above, tokens[at:].copy(), held), at, len(tokens) - at))
        self._touch([node for node, _, _ in path])
        while any(component.surplus() for component in self._components) and self._drop_oldest():
            pass

    def _reach(self, path: Sequence[tuple[Node, int, int]], standing: int) -> int:
        """The deepest position on the path where all components could go on: each may lower it, until none does."""
        goal, before = max(standing, sum(matched for _, _, matched in path)), -1
        while goal != before:
            before = goal
            for at, component in enumerate(self._components):
                stretches = [(begin, node.held[at]) for node, begin, _ in path]
                goal = component.reach(stretches, standing, goal)
        return goal

    def evict(self, wanted: int) -> int:
        """Forget the ends that were wanted longest ago until `wanted` cells came free, or none can; cells that did.

        Content that a slot uses frees nothing and is kept, unless it stands behind content that could go. Of a long
        end only as much goes as is needed.
        """
        freed, pinned = 0, []
        while freed < wanted and (entry := self._oldest()) is not None:
            leaf = entry[2]
            if self._freeable(leaf.held) == 0 and not self._blocks(leaf):
                pinned.append(entry)
                continue
            freed += self._shorten(leaf, wanted - freed)
        for entry in pinned:
            heapq.heappush(self._leaves, entry)
        return freed

    def forget(self) -> None:
        """Forget everything."""
        while self._drop_oldest():
            pass
        self._roots.clear()

    def _walk(self, tokens: Tokens, salt: bytes) -> list[tuple[Node, int, int]]:
        """The nodes along the tokens: each with where its edge begins and how much of it matches; all but the last do
        whole."""
        path: list[tuple[Node, int, int]] = []
        node, at = self._roots.get(salt), 0
        while node is not None and at < len(tokens):
            node = node.children.get(int(tokens[at]))
            if node is None:
                break
            length = min(len(node.tokens), len(tokens) - at)
            same = node.tokens[:length] == tokens[at : at + length]
            matched = length if same.all() else int(same.argmin())
            path.append((node, at, matched))
            if matched < len(node.tokens):
                break
            at += matched
        return path

    def _grow(self, node: Node, tokens: Tokens, held: Holdings) -> Node:
        """Put content behind a node: on its own edge if it is an end, else as a new child."""
        if node.parent is not None and not node.children:
            node.tokens = np.concatenate((node.tokens, tokens))
            joined = zip(self._components, node.held, held, strict=True)
            node.held = [component.joined(old, new) for component, old, new in joined]
            return node
        child = Node(tokens, held, node)
        node.children[int(tokens[0])] = child
        self.nodes += 1
        return child

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node's edge in two; the upper part, which is returned, takes the node's place."""
        assert node.parent is not None, "a root has no edge"
        upper = Node(node.tokens[:at], self._parts(node, 0, at), node.parent)
        upper.used = node.used
        node.parent.children[int(node.tokens[0])] = upper
        upper.children[int(node.tokens[at])] = node
        node.held = self._parts(node, at, len(node.tokens))
        node.tokens, node.parent = node.tokens[at:], upper
        self.nodes += 1
        return upper

    def _parts(self, node: Node, start: int, stop: int) -> Holdings:
        return [component.part(held, start, stop) for component, held in zip(self._components, node.held, strict=True)]

    def _shorten(self, leaf: Node, wanted: int) -> int:
        """Take the last `wanted` tokens off a leaf, or all of it; the cells that came free."""
        keep = len(leaf.tokens) - wanted
        tail = self._parts(leaf, max(keep, 0), len(leaf.tokens))
        freed = self._freeable(tail)
        if keep > 0 and freed:
            leaf.tokens, leaf.held = leaf.tokens[:keep], self._parts(leaf, 0, keep)
            self._offer(leaf)
        else:
            tail, freed = leaf.held, self._freeable(leaf.held)
            self._remove(leaf)
        self._release(tail)
        return freed

    def _drop_oldest(self) -> bool:
        """Forget the end that was wanted longest ago, whoever uses it; False if there is none."""
        entry = self._oldest()
        if entry is None:
            return False
        self._remove(entry[2])
        self._release(entry[2].held)
        return True

    def _oldest(self) -> tuple[int, int, Node] | None:
        """Take the leaf that was wanted longest ago from the queue; entries that have gone stale are dropped."""
        while self._leaves:
            used, serial, leaf = heapq.heappop(self._leaves)
            if leaf.parent is not None and not leaf.children and leaf.used == used:
                return used, serial, leaf
        return None

    def _release(self, held: Holdings) -> None:
        for component, part in zip(self._components, held, strict=True):
            component.release(part)

    def _freeable(self, held: Holdings) -> int:
        """Cells that nobody else references, in the group where they are fewest."""
        return min(component.freeable(part) for component, part in zip(self._components, held, strict=True))

    def _blocks(self, leaf: Node) -> bool:
        """Whether content above the leaf could be freed: slots that computed the same at the same time do that."""
        above = leaf.parent
        while above is not None and above.parent is not None:
            if self._freeable(above.held):
                return True
            above = above.parent
        return False

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None, "a root is no leaf"
        del parent.children[int(leaf.tokens[0])]
        leaf.parent = None
        self.nodes -= 1
        if parent.parent is not None and not parent.children:
            self._offer(parent)

    def _touch(self, path: Sequence[Node]) -> None:
        self._clock += 1
        for node in path:
            node.used = self._clock
        if path and not path[-1].children:
            self._offer(path[-1])

    def _offer(self, leaf: Node) -> None:
        """Enter a leaf among those that may be evicted."""
        self._serial += 1
        heapq.heappush(self._leaves, (leaf.used, self._serial, leaf))
        # Every use enters its leaf anew, so a prompt that comes again and again would fill the heap with stale entries.
        if len(self._leaves) > 2 * self.nodes + 64:
            last = {id(entry[2]): entry for entry in sorted(self._leaves)}
            self._leaves = [entry for entry in last.values() if entry[2].parent is not None and not entry[2].children]
            heapq.heapify(self._leaves)
