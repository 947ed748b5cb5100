"""The prefix tree: what slots computed, kept under the tokens that it was computed from.

A radix tree over tokens, exact to the token. Each node owns references to the cells of its edge, in every component,
so content outlives its slot and is shared without copying. A slot that stands inside the tree may be extended from it
while others run; what they compute is put in as it grows. Trees with different salts never meet. What there are no
cells for lies on the shelf (kvcache/shelf.py), is found all the same, and comes back when it is wanted.

Invariants: siblings' edges differ in their first token; a resident node's content covers exactly its edge, and so do
the pieces of one that is not; no resident node stands below one that is not; the tree writes no cell but fresh ones;
a node was used later than its children, so of the resident nodes the one used longest ago has no resident child.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from kvcache.component import Component
from kvcache.components import Components
from kvcache.node import Entry, Holdings, Node, Piece, Tokens, cut
from kvcache.shelf import Shelf, ShelfConfig

# Nodes in the order of their last use, longest ago first.
Recency: TypeAlias = OrderedDict[Node, None]
# Fewer tokens are computed about as fast as a file is read and checked (measured: 1 ms for a small one).
LEAST_LOADED = 16
# What goes to the shelf goes in no smaller parts: running sequences need a cell or two at a time.
LEAST_SHELVED = 256


class PrefixTree:
    """Content of former and running slots, found by its tokens. Belongs to the cache.

    token_bytes  that one token's content takes, at most
    """

    def __init__(self, components: Sequence[Component[Any]], shelf: ShelfConfig, *, token_bytes: int) -> None:
        self._all = Components(components)
        self._roots: dict[bytes, Node] = {}
        self._resident: Recency = OrderedDict()
        # Those of the resident nodes, by component, from which `thin` would release something.
        self._thick: tuple[Recency, ...] = tuple(OrderedDict() for _ in components)
        self.nodes = 0
        self.shelf = Shelf(shelf, self._all, token_bytes=token_bytes, lose=self._lose)
        self._find()

    def recall(self, slot: int, standing: int, tokens: Tokens, salt: bytes) -> int:
        """Extend a slot that stands at `standing` with the same tokens, as far as the tree reaches; the new length."""
        path, depth = self._walk(tokens, salt)
        self._touch(path)
        if any(not node.resident for node in path):
            path, depth = self._promote(path, standing, depth)
        goal = self._all.reach(path, standing, depth)
        for node in path:
            start, stop = max(standing - node.start, 0), min(goal - node.start, len(node.tokens))
            if start < stop:
                self._all.restore(slot, self._all.part(node.held, start, stop))
                standing = node.start + stop
        self._heed_surplus()
        return standing

    def remember(self, slot: int, tokens: Tokens, salt: bytes, *, seal: bool = False) -> None:
        """Hold what the slot has for its first `len(tokens)` tokens; where the tree has them already, its own stays.

        seal  make their end a place to resume at: the node ends there for good, and thinning keeps what it takes
        """
        path, depth = self._walk(tokens, salt)
        if path and (seal or depth < len(tokens)):
            path[-1] = self._end(path, depth, salt)
        for node in path:
            if not node.resident and node.stop <= depth:
                self._settle(node, self._all.hold(slot, node.start, node.stop))
        if path and depth == path[-1].stop:
            self._heal(slot, path, depth)
        if depth < len(tokens):
            self._grow(slot, path, tokens, salt)
        if path and seal:
            path[-1].sealed = True
        self._touch(path)
        self._heed_surplus()

    def known(self, tokens: Tokens, salt: bytes) -> int:
        """How many of the tokens the tree knows, whether or not one could go on there."""
        return self._walk(tokens, salt)[1]

    def evict(self, lacking: Sequence[int]) -> bool:
        """Release what is wanted least until each component has what it lacks, or nothing helps; whether any came free.

        lacking  for each component, as its `freeable` counts

        First nodes lose all but what going on at their ends takes; then ends go, and of a long one only as much as is
        needed. They go to the shelf, if there is one. Content that a slot uses frees nothing and is kept, unless it
        stands behind content that could go.
        """
        need = list(lacking)
        self._make_room(need)
        self.shelf.fit()
        return any(after < before for before, after in zip(lacking, need, strict=True))

    def forget(self) -> None:
        """Let go of everything in cells, whoever uses it; what the shelf has stays."""
        while self._resident:
            self._demote(next(iter(self._resident)))
        self.shelf.fit()

    def _walk(self, tokens: Tokens, salt: bytes) -> tuple[list[Node], int]:
        """The nodes along the tokens, and how many of the tokens they match: all but the last node match whole."""
        path: list[Node] = []
        node, depth = self._roots.get(salt), 0
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

    def _end(self, path: Sequence[Node], depth: int, salt: bytes) -> Node:
        """The node that ends where a path matches: its last one, split there for good if it goes on."""
        if not path:
            return self._roots.setdefault(salt, Node(np.empty(0, dtype=np.int64), None, 0, salt))
        if depth == path[-1].stop:
            return path[-1]
        upper = self._split(path[-1], depth - path[-1].start)
        upper.sealed = True
        return upper

    def _extend(self, above: Node, tokens: Tokens) -> Node:
        """Where tokens go behind a node: its own edge, if it is an end that is not sealed, else a new child."""
        if above.parent is not None and not above.children and not above.sealed:
            above.tokens = np.concatenate((above.tokens, tokens))
            return above
        child = Node(tokens, above, above.stop, above.salt)
        above.children[int(tokens[0])] = child
        self.nodes += 1
        return child

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node's edge in two; the upper part, which is returned, takes the node's place."""
        assert node.parent is not None, "a root has no edge"
        upper = Node(node.tokens[:at], node.parent, node.start, node.salt)
        upper.used, upper.resident, upper.warm = node.used, node.resident, int(node.resident)
        node.parent.children[int(node.tokens[0])] = upper
        upper.children[int(node.tokens[at])] = node
        if node.resident:
            upper.held, node.held = self._all.part(node.held, 0, at), self._all.part(node.held, at, len(node.tokens))
        node.tokens, node.parent, node.start = node.tokens[at:], upper, node.start + at
        self.nodes += 1
        over, under = cut(node.pieces, at)
        upper.link(over)
        self.shelf.link(node, under)
        self.shelf.note(upper)
        for part in (node, upper):
            if part.resident:
                self._enter(part)
        return upper

    def _prune(self, node: Node) -> None:
        """Cut off what a node that is not resident does not have on the shelf, and all below that."""
        shelved = node.shelved
        if shelved == len(node.tokens):
            return
        gone = list(node.children.values())
        node.children.clear()
        if shelved:
            node.tokens = node.tokens[:shelved]
            self.shelf.note(node)
        else:
            self._unhook(node)
            gone.append(node)
        for each in gone:
            gone.extend(each.children.values())
            each.parent = None
            self.nodes -= 1
            self.shelf.link(each, [])

    def _unhook(self, node: Node) -> None:
        """Take a node from its parent, and a root from the tree that has nothing else."""
        parent = node.parent
        assert parent is not None, "a root has no edge"
        del parent.children[int(node.tokens[0])]
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]

    def _grow(self, slot: int, path: list[Node], tokens: Tokens, salt: bytes) -> None:
        """Put what a slot has for the tokens behind a path, which ends where it matches."""
        above = self._end(path, path[-1].stop if path else 0, salt)
        start = above.stop
        held = self._all.hold(slot, start, len(tokens))
        node = self._extend(above, tokens[start:].copy())
        if node is above:
            node.held = self._all.joined(node.held, held)
            self.shelf.note(node)
            self._enter(node)
        else:
            self._settle(node, held)
            path.append(node)

    def _settle(self, node: Node, held: Holdings) -> None:
        """Give a node content in cells; what the shelf has of it in memory alone is not needed any more."""
        assert node.parent is not None, "a root has no edge"
        node.held, node.resident = held, True
        node.parent.warm += 1
        self.shelf.link(node, node.filed)
        self._enter(node)

    def _enter(self, node: Node) -> None:
        """Put a resident node in the orders where its content belongs."""
        self._resident[node] = None
        for component, held, thick in zip(self._all, node.held, self._thick, strict=True):
            if component.thinnable(held, node.start):
                thick[node] = None
            else:
                thick.pop(node, None)

    def _leave(self, node: Node) -> Holdings:
        """Take a node's content from it; nothing is released."""
        assert node.parent is not None, "a root has no edge"
        held, node.held, node.resident = node.held, [], False
        node.parent.warm -= 1
        for order in (self._resident, *self._thick):
            order.pop(node, None)
        return held

    def _heal(self, slot: int, path: Sequence[Node], depth: int) -> None:
        """Where the path's content does not reach its end but the slot's own does, take that."""
        if not self._all.stands(slot, depth):
            return
        for node in reversed(path):
            if self._all.reach(path, 0, depth) == depth:
                return
            for at, component in enumerate(self._all):
                if component.reach([(each.start, each.held[at]) for each in path], 0, depth) < depth:
                    gapped, node.held[at] = node.held[at], component.hold(slot, node.start, node.stop)
                    component.release(gapped)
            self.shelf.link(node, [])
            self._enter(node)

    def _touch(self, path: Sequence[Node]) -> None:
        """Note that a path is wanted; its upper nodes count as used after the lower ones."""
        for node in reversed(path):
            self.shelf.touch(node)
            for order in (self._resident, *self._thick):
                if node in order:
                    order.move_to_end(node)

    def _make_room(self, need: list[int]) -> None:
        """Release what is wanted least, and count down what each component needs. The shelf may be too full then."""
        self._thin(need)
        self._drop_ends(need)
        while any(count > 0 for count in need) and (twin := self._twin(need)) is not None:
            self._demote(twin)
            self._drop_ends(need)

    def _drop_ends(self, need: list[int]) -> None:
        """Let ends go that free something, or stand behind what would, those wanted longest ago first."""
        aside = []
        while any(count > 0 for count in need) and self._resident:
            leaf = next(iter(self._resident))
            if leaf.warm or not any(self._all.helps(node.held, need) for node in reversed(leaf.path())):
                del self._resident[leaf]
                aside.append(leaf)
            else:
                self._shorten(leaf, need)
        for node in reversed(aside):
            self._resident[node] = None
            self._resident.move_to_end(node, last=False)

    def _twin(self, need: Sequence[int]) -> Node | None:
        """An end that frees nothing though no slot uses it: what it holds is held under another salt as well."""
        return next((node for node in self._resident if not node.warm and self._all.idles(node.held, need)), None)

    def _thin(self, need: list[int]) -> None:
        """Let nodes keep only what going on at their ends takes, as long as that gives a component what it needs."""
        for at, (component, thick) in enumerate(zip(self._all, self._thick, strict=True)):
            while need[at] > 0 and thick:
                node, _ = thick.popitem(last=False)
                before = component.freeable(node.held[at])
                node.held[at] = component.thin(node.held[at], node.start)
                need[at] -= before - component.freeable(node.held[at])

    def _shorten(self, leaf: Node, need: list[int]) -> None:
        """Take off a leaf what is needed, or all of it."""
        keep = len(leaf.tokens) - max(*need, LEAST_SHELVED if self.shelf.keeps else 0)
        keep = self._all.reach(leaf.path(), 0, leaf.start + keep) - leaf.start if keep > 0 else 0
        if keep > 0 and self._all.helps(self._all.part(leaf.held, keep, len(leaf.tokens)), need):
            self._resident.move_to_end(self._split(leaf, keep), last=False)
        for at, count in enumerate(self._all.freeable(leaf.held)):
            need[at] -= count
        self._demote(leaf)

    def _demote(self, node: Node) -> None:
        """Take a node out of the cells: what is not on the shelf then is forgotten."""
        if self.shelf.keeps:
            node.held = self._all.thin(node.held, node.start)
            self.shelf.put(node)
        self._all.release(self._leave(node))
        self._prune(node)

    def _heed_surplus(self) -> None:
        if any(surplus := self._all.surplus()):
            self.evict(surplus)

    def _promote(self, path: list[Node], standing: int, depth: int) -> tuple[list[Node], int]:
        """Bring what lies on the shelf along a path into cells, as far as it fits; what of the path is resident then.

        The path itself is kept out of the order of those that have to make room.
        """
        first = next(at for at, node in enumerate(path) if not node.resident)
        if depth - max(standing, path[first].start) < LEAST_LOADED:
            return path[:first], min(depth, path[first].start)
        for node in path[:first]:
            del self._resident[node]
        whole = path[:first]
        for node in path[first:]:
            # A file that is refused takes along what was below it.
            if node.parent is None:
                break
            wanted = self._split(node, depth - node.start) if depth < node.stop else node
            loaded = self._load(wanted)
            if loaded is None:
                break
            del self._resident[loaded]
            whole.append(loaded)
            if loaded is not wanted:
                break
        for node in whole:
            self._enter(node)
        self._touch(whole)
        # Not earlier, or what had to make room would push off the shelf what has not come yet.
        self.shelf.fit()
        return whole, min(depth, whole[-1].stop if whole else 0)

    def _load(self, node: Node) -> Node | None:
        """Bring a node's content into cells; what does not fit stays behind as a node below. None: nothing came."""
        held: Holdings = []
        length = 0
        for piece in tuple(node.pieces):
            part = self._fresh(piece)
            if part is None:
                break
            held = self._all.joined(held, part) if length else part
            length += piece.stop - piece.start
        if length == 0:
            return None
        if length < len(node.tokens):
            node = self._split(node, length)
        self._settle(node, held)
        return node

    def _fresh(self, piece: Piece) -> Holdings | None:
        """A piece's content in fresh cells, for which others are evicted; None if it cannot be had."""
        content = self.shelf.content(piece.entry)
        if content is None:
            return None
        self._make_room(self._all.lacking(content, piece.start, piece.stop))
        if any(self._all.lacking(content, piece.start, piece.stop)):
            return None
        return self._all.load(content, piece.start, piece.stop)

    def _lose(self, entry: Entry) -> None:
        """Forget what an entry alone had; the shelf calls this."""
        while entry.nodes:
            node = next(iter(entry.nodes))
            entries = [piece.entry for piece in node.pieces]
            self.shelf.link(node, node.pieces[: entries.index(entry)])
            if not node.resident:
                self._prune(node)

    def _find(self) -> None:
        """Take in what earlier processes left in files; what has lost its beginning, or is there twice, is deleted."""
        found = list(self.shelf.scan())
        for file, entry in found:
            tokens, start = file.stretch.tokens, file.stretch.start
            path, depth = self._walk(tokens, file.stretch.salt)
            if not start <= depth < len(tokens):
                self.shelf.drop(entry)
                continue
            node = self._extend(self._end(path, depth, file.stretch.salt), tokens[depth:])
            node.sealed = file.stretch.ends
            self.shelf.link(node, [*node.pieces, Piece(entry, depth - start, len(tokens) - start)])
        for _, entry in sorted(found, key=lambda pair: pair[0].used):
            if entry.nodes:
                self._touch(max(entry.nodes, key=lambda node: node.stop).path())
        self.shelf.fit()
