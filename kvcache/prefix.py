"""The prefix tree: what slots computed, kept under the tokens that it was computed from.

Each node of a radix tree (kvcache/radix.py) owns references to the cells of its edge, in every component, so content
outlives its slot and is shared without copying. A slot that stands inside the tree may be extended from it while others
run; what they compute is put in as it grows. Trees with different salts never meet. What there are no cells for lies on
the shelf (kvcache/shelf.py), is found all the same, and comes back when it is wanted. The tree writes no cell but fresh
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcache.components import Components
from kvcache.node import Holdings, Node, Piece, Tokens
from kvcache.radix import RadixTree
from kvcache.shelf import Shelf, ShelfConfig

# Fewer tokens are computed about as fast as a file is read and checked (measured: 1 ms for a small one).
LEAST_LOADED = 16
# What goes to the shelf goes in no smaller parts: running sequences need a cell or two at a time.
LEAST_SHELVED = 256


@dataclass(slots=True)
class Counts:
    """What became of remembered tokens, since the start.

    evicted  left the cells, for the shelf or for good
    thinned  of edges that keep only what it takes to go on at their ends; counted for each kind of memory
    loaded   came back from the shelf
    saved    were written to files
    """

    evicted: int = 0
    thinned: int = 0
    loaded: int = 0
    saved: int = 0


@dataclass(frozen=True, slots=True)
class Known:
    """What the tree has of a text: so many of its tokens, and whether others went on differently there."""

    length: int
    parted: bool


class PrefixTree:
    """Content of former and running slots, found by its tokens. Belongs to the cache.

    token_bytes  that one token's content takes, at most
    piece        tokens that a long leaf loses at once even where fewer are needed: sequences that grow one by one then
                 find cells side by side, and seldom have to look for them
    """

    def __init__(self, components: Components, shelf: ShelfConfig, *, token_bytes: int, piece: int = 1) -> None:
        self._components, self._piece = components, piece
        self._radix = RadixTree(self._components, shelf, token_bytes=token_bytes)
        self._counts = Counts()
        self._find()

    @property
    def nodes(self) -> int:
        """Edges of all texts, in cells or on the shelf."""
        return self._radix.nodes

    @property
    def counts(self) -> Counts:
        """What became of remembered tokens so far."""
        return replace(self._counts, saved=self.shelf.saved)

    @property
    def shelf(self) -> Shelf:
        """What lies outside the cells."""
        return self._radix.shelf

    def recall(self, slot: int, standing: int, tokens: Tokens, salt: bytes) -> int:
        """Extend a slot that stands at `standing` with the same tokens, as far as the tree reaches; the new length."""
        path, depth = self._radix.walk(tokens, salt)
        self._radix.touch(path)
        if any(not node.resident for node in path):
            path, depth = self._promote(path, standing, depth)
        goal = self._components.deepest([node.stretch for node in path], standing, depth)
        for node in path:
            start, stop = max(standing - node.start, 0), min(goal - node.start, len(node.tokens))
            if start < stop:
                self._components.restore(slot, self._components.part(node.held, start, stop))
                standing = node.start + stop
        self._heed_surplus()
        return standing

    def remember(self, slot: int, tokens: Tokens, salt: bytes, *, seal: bool = False) -> None:
        """Hold what the slot has for its first `len(tokens)` tokens; where the tree has them already, its own stays.

        seal  make their end a place to resume at: the node ends there for good, and thinning keeps what it takes
        """
        path, depth = self._radix.walk(tokens, salt)
        if path and (seal or depth < len(tokens)):
            path[-1] = self._radix.end(path, depth, salt)
        for node in path:
            if not node.resident and node.stop <= depth:
                self._radix.settle(node, self._components.hold(slot, node.start, node.stop))
        if path and depth == path[-1].stop:
            self._heal(slot, path, depth)
        if depth < len(tokens):
            self._grow(slot, path, tokens, salt)
        if path and seal:
            path[-1].sealed = True
        self._radix.touch(path)
        self._heed_surplus()

    def known(self, tokens: Tokens, salt: bytes) -> Known:
        """How many of the tokens the tree knows, whether or not one could go on there."""
        path, depth = self._radix.walk(tokens, salt)
        goes_on = bool(path) and (depth < path[-1].stop or bool(path[-1].children))
        return Known(depth, parted=goes_on and depth < len(tokens))

    def evict(self, lacking: Sequence[int]) -> bool:
        """Release what is wanted least until each component has what it lacks, or nothing helps; whether any came free.

        lacking  for each component, as its `freeable` counts

        First nodes are thinned to what it takes to go on at their ends; then leaves go, a long one only as far as is
        needed, and to the shelf if there is one. Content that a slot uses frees nothing and is kept, unless it stands
        below content that could go.
        """
        need = list(lacking)
        self._make_room(need)
        self.shelf.fit()
        return any(after < before for before, after in zip(lacking, need, strict=True))

    def forget(self) -> None:
        """Let go of everything in cells, whoever uses it; what the shelf has stays."""
        while self._radix.resident:
            self._demote(next(iter(self._radix.resident)))
        self.shelf.fit()

    def _grow(self, slot: int, path: list[Node], tokens: Tokens, salt: bytes) -> None:
        """Put what a slot has for the tokens behind a path, which ends where it matches."""
        above = self._radix.end(path, path[-1].stop if path else 0, salt)
        start = above.stop
        held = self._components.hold(slot, start, len(tokens))
        node = self._radix.extend(above, tokens[start:].copy())
        if node is above:
            node.held = self._components.joined(node.held, held)
            self.shelf.note(node)
            self._radix.enter(node)
        else:
            self._radix.settle(node, held)
            path.append(node)

    def _heal(self, slot: int, path: Sequence[Node], depth: int) -> None:
        """Where the path's content does not reach its end but the slot's own does, take that."""
        if self._components.standing(slot, depth) < depth:
            return
        for node in reversed(path):
            if self._components.deepest([each.stretch for each in path], 0, depth) == depth:
                return
            for at, component in enumerate(self._components):
                if component.deepest([(each.start, each.held[at]) for each in path], 0, depth) < depth:
                    gapped, node.held[at] = node.held[at], component.hold(slot, node.start, node.stop)
                    component.release(gapped)
            self.shelf.link(node, [])
            self._radix.enter(node)

    def _make_room(self, need: list[int]) -> None:
        """Release what is wanted least, and count down what each component needs; the shelf may outgrow its budget."""
        self._thin(need)
        self._drop_leaves(need)
        while any(count > 0 for count in need) and (twin := self._twin(need)) is not None:
            self._demote(twin)
            self._drop_leaves(need)

    def _drop_leaves(self, need: list[int]) -> None:
        """Let leaves go that free something, or stand below what would, those wanted longest ago first."""
        aside = []
        while any(count > 0 for count in need) and self._radix.resident:
            leaf = next(iter(self._radix.resident))
            if leaf.warm or not any(self._components.helps(node.held, need) for node in reversed(leaf.path())):
                del self._radix.resident[leaf]
                aside.append(leaf)
            else:
                self._shorten(leaf, need)
        for node in reversed(aside):
            self._radix.resident[node] = None
            self._radix.resident.move_to_end(node, last=False)

    def _twin(self, need: Sequence[int]) -> Node | None:
        """A leaf that frees nothing though no slot uses it: what it holds is held under another salt as well."""
        return next(
            (node for node in self._radix.resident if not node.warm and self._components.idles(node.held, need)), None
        )

    def _thin(self, need: list[int]) -> None:
        """Let nodes keep only what it takes to go on at their ends, until each component has what it needs."""
        for at, (component, thick) in enumerate(zip(self._components, self._radix.thick, strict=True)):
            while need[at] > 0 and thick:
                node, _ = thick.popitem(last=False)
                before = component.freeable(node.held[at])
                node.held[at] = component.thin(node.held[at], node.start)
                need[at] -= before - component.freeable(node.held[at])
                self._counts.thinned += len(node.tokens)

    def _shorten(self, leaf: Node, need: list[int]) -> None:
        """Take off a leaf what is needed, or a little more, or all of it."""
        keep = len(leaf.tokens) - max(*need, LEAST_SHELVED if self.shelf.keeps else self._piece)
        if keep > 0:
            keep = self._components.deepest([node.stretch for node in leaf.path()], 0, leaf.start + keep) - leaf.start
        if keep > 0 and self._components.helps(self._components.part(leaf.held, keep, len(leaf.tokens)), need):
            self._radix.resident.move_to_end(self._radix.split(leaf, keep), last=False)
        for at, count in enumerate(self._components.freeable(leaf.held)):
            need[at] -= count
        self._demote(leaf)

    def _demote(self, node: Node) -> None:
        """Take a node out of the cells: what is not on the shelf then is forgotten."""
        if self.shelf.keeps:
            node.held = self._components.thin(node.held, node.start)
            self.shelf.put(node)
        self._counts.evicted += len(node.tokens)
        self._components.release(self._radix.leave(node))
        self._radix.prune(node)

    def _heed_surplus(self) -> None:
        if any(surplus := self._components.surplus()):
            self.evict(surplus)

    def _promote(self, path: list[Node], standing: int, depth: int) -> tuple[list[Node], int]:
        """Bring what lies on the shelf along a path into cells, as far as it fits; what of the path is resident then.

        The path itself is kept out of the order of those that have to make room.
        """
        first = next(at for at, node in enumerate(path) if not node.resident)
        depth = self._promised(path, standing, depth)
        if depth - max(standing, path[first].start) < LEAST_LOADED:
            return path[:first], min(depth, path[first].start)
        for node in path[:first]:
            del self._radix.resident[node]
        whole = path[:first]
        for node in path[first:]:
            # A file that is refused takes along what was below it.
            if node.parent is None or depth <= node.start:
                break
            wanted = self._radix.split(node, depth - node.start) if depth < node.stop else node
            loaded = self._load(wanted)
            if loaded is None:
                break
            del self._radix.resident[loaded]
            whole.append(loaded)
            if loaded is not wanted:
                break
        for node in whole:
            self._radix.enter(node)
        self._radix.touch(whole)
        # Only now: before, what had to make room would push off the shelf what was still to come.
        self.shelf.fit()
        return whole, min(depth, whole[-1].stop if whole else 0)

    def _promised(self, path: Sequence[Node], standing: int, depth: int) -> int:
        """How deep one could go on if all of a path were in cells; `depth`, if a file was not looked into yet."""
        stretches = []
        for node in path:
            if node.resident:
                stretches.append(node.stretch)
                continue
            for piece in node.pieces:
                if piece.entry.outline is None:
                    return depth
                outline = self._components.part(piece.entry.outline, piece.start, piece.stop)
                stretches.append((piece.entry.start + piece.start, outline))
        return self._components.deepest(stretches, standing, depth)

    def _load(self, node: Node) -> Node | None:
        """Bring a node's content into cells; what does not fit stays behind as a node below. None: nothing came."""
        held: Holdings = []
        length = 0
        for piece in tuple(node.pieces):
            part = self._fresh(piece)
            if part is None:
                break
            held = self._components.joined(held, part) if length else part
            length += piece.stop - piece.start
        if length == 0:
            return None
        if length < len(node.tokens):
            node = self._radix.split(node, length)
        self._radix.settle(node, held)
        self._counts.loaded += length
        return node

    def _fresh(self, piece: Piece) -> Holdings | None:
        """A piece's content in fresh cells, for which others are evicted; None if it cannot be had."""
        content = self.shelf.content(piece.entry)
        if content is None:
            return None
        self._make_room(self._components.lacking(content, piece.start, piece.stop))
        if any(self._components.lacking(content, piece.start, piece.stop)):
            return None
        return self._components.load(content, piece.start, piece.stop)

    def _find(self) -> None:
        """Take in what earlier processes left in files; what has lost its beginning, or is there twice, is deleted."""
        found = list(self.shelf.scan())
        for file, entry in found:
            tokens, start = file.stretch.tokens, file.stretch.start
            path, depth = self._radix.walk(tokens, file.stretch.salt)
            if not start <= depth < len(tokens):
                self.shelf.drop(entry)
                continue
            node = self._radix.extend(self._radix.end(path, depth, file.stretch.salt), tokens[depth:])
            node.sealed = file.stretch.ends
            self.shelf.link(node, [*node.pieces, Piece(entry, depth - start, len(tokens) - start)])
        for _, entry in sorted(found, key=lambda pair: pair[0].used):
            if entry.nodes:
                self._radix.touch(max(entry.nodes, key=lambda node: node.stop).path())
        self.shelf.fit()
