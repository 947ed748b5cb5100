"""The prefix tree: what slots computed, kept under the tokens that it was computed from.

Each node of a radix tree (kvcache/radix.py) owns references to the cells of its edge, in every component, so content
outlives its slot and is shared without copying. A slot that stands inside the tree may be extended from it while others
run; what they compute is put in as it grows. Trees with different salts never meet. What there are no cells for lies on
the shelf (kvcache/offload.py), is found all the same, and comes back when it is wanted. The tree writes no cell but fresh
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcache.components import CacheComponents
from kvcache.node import ComponentReferences, EntrySlice, Node, TokenArray
from kvcache.offload import OffloadConfig, OffloadTier
from kvcache.radix import RadixTree

# Fewer tokens are computed about as fast as a file is read and checked (measured: 1 ms for a small one).
MIN_LOAD_TOKENS = 16
# What goes to the shelf goes in no smaller parts: running sequences need a cell or two at a time.
MIN_OFFLOAD_TOKENS = 256


@dataclass(slots=True)
class PrefixCounts:
    """What became of remembered tokens, since the start.

    evicted  left the cells, for the shelf or for good
    trimmed  of edges that keep only what it takes to go on at their ends; counted for each kind of memory
    loaded   came back from the shelf
    written    were written to files
    """

    evicted: int = 0
    trimmed: int = 0
    loaded: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the tree has of a text: so many of its tokens, and whether others went on differently there."""

    length: int
    diverged: bool


class PrefixTree:
    """Content of former and running slots, found by its tokens. Belongs to the cache.

    token_bytes  that one token's content takes, at most
    piece        tokens that a long leaf loses at once even where fewer are needed: sequences that grow one by one then
                 find cells side by side, and seldom have to look for them
    """

    def __init__(
        self, components: CacheComponents, offload: OffloadConfig, *, token_bytes: int, min_eviction: int = 1
    ) -> None:
        self._components, self._min_eviction = components, min_eviction
        self._radix = RadixTree(self._components, offload, token_bytes=token_bytes)
        self._counts = PrefixCounts()
        self._insert_files()

    @property
    def node_count(self) -> int:
        """Edges of all texts, in cells or on the shelf."""
        return self._radix.node_count

    @property
    def counts(self) -> PrefixCounts:
        """What became of remembered tokens so far."""
        return replace(self._counts, written=self.offload.written_tokens)

    @property
    def offload(self) -> OffloadTier:
        """What lies outside the cells."""
        return self._radix.offload

    def extend_slot(self, slot: int, cached_length: int, tokens: TokenArray, salt: bytes) -> int:
        """Extend a slot that stands at `cached_length` with the same tokens, as far as the tree reaches; the new length."""
        path, depth = self._radix.match(tokens, salt)
        self._radix.touch(path)
        if any(not node.resident for node in path):
            path, depth = self._load_path(path, cached_length, depth)
        goal = self._components.resume_depth([node.start_and_references for node in path], cached_length, depth)
        for node in path:
            start, stop = max(cached_length - node.start, 0), min(goal - node.start, len(node.tokens))
            if start < stop:
                self._components.attach(slot, self._components.slice(node.references, start, stop))
                cached_length = node.start + stop
        self._enforce_budgets()
        return cached_length

    def insert(self, slot: int, tokens: TokenArray, salt: bytes, *, checkpoint: bool = False) -> None:
        """Hold what the slot has for its first `len(tokens)` tokens; where the tree has them already, its own stays.

        seal  make their end a place to resume at: the node ends there for good, and thinning keeps what it takes
        """
        path, depth = self._radix.match(tokens, salt)
        if path and (checkpoint or depth < len(tokens)):
            path[-1] = self._radix.node_at_end(path, depth, salt)
        for node in path:
            if not node.resident and node.stop <= depth:
                self._radix.make_resident(node, self._components.acquire(slot, node.start, node.stop))
        if path and depth == path[-1].stop:
            self._fill_gaps(slot, path, depth)
        if depth < len(tokens):
            self._insert_tail(slot, path, tokens, salt)
        if path and checkpoint:
            path[-1].fixed_end = True
        self._radix.touch(path)
        self._enforce_budgets()

    def match(self, tokens: TokenArray, salt: bytes) -> PrefixMatch:
        """How many of the tokens the tree knows, whether or not one could go on there."""
        path, depth = self._radix.match(tokens, salt)
        goes_on = bool(path) and (depth < path[-1].stop or bool(path[-1].children))
        return PrefixMatch(depth, diverged=goes_on and depth < len(tokens))

    def evict(self, needed: Sequence[int]) -> bool:
        """Release what is wanted least until each component has what it lacks, or nothing helps; whether any came free.

        lacking  for each component, as its `freeable` counts

        First nodes are thinned to what it takes to go on at their ends; then leaves go, a long one only as far as is
        needed, and to the shelf if there is one. Content that a slot uses frees nothing and is kept, unless it stands
        below content that could go.
        """
        need = list(needed)
        self._evict_until_freed(need)
        self.offload.enforce_budgets()
        return any(after < before for before, after in zip(needed, need, strict=True))

    def reset(self) -> None:
        """Let go of everything in cells, whoever uses it; what the shelf has stays."""
        while self._radix.lru:
            self._offload_node(next(iter(self._radix.lru)))
        self.offload.enforce_budgets()

    def _insert_tail(self, slot: int, path: list[Node], tokens: TokenArray, salt: bytes) -> None:
        """Put what a slot has for the tokens behind a path, which ends where it matches."""
        above = self._radix.node_at_end(path, path[-1].stop if path else 0, salt)
        start = above.stop
        held = self._components.acquire(slot, start, len(tokens))
        node = self._radix.add_tokens(above, tokens[start:].copy())
        if node is above:
            node.references = self._components.concat(node.references, held)
            self.offload.track_unwritten(node)
            self._radix.add_to_lru(node)
        else:
            self._radix.make_resident(node, held)
            path.append(node)

    def _fill_gaps(self, slot: int, path: Sequence[Node], depth: int) -> None:
        """Where the path's content does not reach its end but the slot's own does, take that."""
        if self._components.resume_length(slot, depth) < depth:
            return
        for node in reversed(path):
            if self._components.resume_depth([each.start_and_references for each in path], 0, depth) == depth:
                return
            for at, component in enumerate(self._components):
                if component.resume_depth([(each.start, each.references[at]) for each in path], 0, depth) < depth:
                    gapped, node.references[at] = node.references[at], component.acquire(slot, node.start, node.stop)
                    component.release(gapped)
            self.offload.set_entry_slices(node, [])
            self._radix.add_to_lru(node)

    def _evict_until_freed(self, need: list[int]) -> None:
        """Release what is wanted least, and count down what each component needs; the shelf may outgrow its budget."""
        self._trim(need)
        self._evict_leaves(need)
        while any(count > 0 for count in need) and (twin := self._duplicate_leaf(need)) is not None:
            self._offload_node(twin)
            self._evict_leaves(need)

    def _evict_leaves(self, need: list[int]) -> None:
        """Let leaves go that free something, or stand below what would, those wanted longest ago first."""
        aside = []
        while any(count > 0 for count in need) and self._radix.lru:
            leaf = next(iter(self._radix.lru))
            if leaf.resident_children or not any(
                self._components.frees_needed(node.references, need) for node in reversed(leaf.path())
            ):
                del self._radix.lru[leaf]
                aside.append(leaf)
            else:
                self._evict_tail(leaf, need)
        for node in reversed(aside):
            self._radix.lru[node] = None
            self._radix.lru.move_to_end(node, last=False)

    def _duplicate_leaf(self, need: Sequence[int]) -> Node | None:
        """A leaf that frees nothing though no slot uses it: what it holds is held under another salt as well."""
        return next(
            (
                node
                for node in self._radix.lru
                if not node.resident_children and self._components.has_unused_cells(node.references, need)
            ),
            None,
        )

    def _trim(self, need: list[int]) -> None:
        """Let nodes keep only what it takes to go on at their ends, until each component has what it needs."""
        for at, (component, thick) in enumerate(zip(self._components, self._radix.trimmable, strict=True)):
            while need[at] > 0 and thick:
                node, _ = thick.popitem(last=False)
                before = component.freeable(node.references[at])
                node.references[at] = component.trim(node.references[at], node.start)
                need[at] -= before - component.freeable(node.references[at])
                self._counts.trimmed += len(node.tokens)

    def _evict_tail(self, leaf: Node, need: list[int]) -> None:
        """Take off a leaf what is needed, or a little more, or all of it."""
        keep = len(leaf.tokens) - max(*need, MIN_OFFLOAD_TOKENS if self.offload.enabled else self._min_eviction)
        if keep > 0:
            keep = (
                self._components.resume_depth([node.start_and_references for node in leaf.path()], 0, leaf.start + keep)
                - leaf.start
            )
        if keep > 0 and self._components.frees_needed(
            self._components.slice(leaf.references, keep, len(leaf.tokens)), need
        ):
            self._radix.lru.move_to_end(self._radix.split(leaf, keep), last=False)
        for at, count in enumerate(self._components.freeable(leaf.references)):
            need[at] -= count
        self._offload_node(leaf)

    def _offload_node(self, node: Node) -> None:
        """Take a node out of the cells: what is not on the shelf then is forgotten."""
        if self.offload.enabled:
            node.references = self._components.trim(node.references, node.start)
            self.offload.offload(node)
        self._counts.evicted += len(node.tokens)
        self._components.release(self._radix.take_references(node))
        self._radix.prune(node)

    def _enforce_budgets(self) -> None:
        if any(surplus := self._components.over_budget()):
            self.evict(surplus)

    def _load_path(self, path: list[Node], cached_length: int, depth: int) -> tuple[list[Node], int]:
        """Bring what lies on the shelf along a path into cells, as far as it fits; what of the path is resident then.

        The path itself is kept out of the order of those that have to make room.
        """
        first = next(at for at, node in enumerate(path) if not node.resident)
        depth = self._loadable_depth(path, cached_length, depth)
        if depth - max(cached_length, path[first].start) < MIN_LOAD_TOKENS:
            return path[:first], min(depth, path[first].start)
        for node in path[:first]:
            del self._radix.lru[node]
        whole = path[:first]
        for node in path[first:]:
            # A file that is refused takes along what was below it.
            if node.parent is None or depth <= node.start:
                break
            wanted = self._radix.split(node, depth - node.start) if depth < node.stop else node
            loaded = self._load_node(wanted)
            if loaded is None:
                break
            del self._radix.lru[loaded]
            whole.append(loaded)
            if loaded is not wanted:
                break
        for node in whole:
            self._radix.add_to_lru(node)
        self._radix.touch(whole)
        # Only now: before, what had to make room would push off the shelf what was still to come.
        self.offload.enforce_budgets()
        return whole, min(depth, whole[-1].stop if whole else 0)

    def _loadable_depth(self, path: Sequence[Node], cached_length: int, depth: int) -> int:
        """How deep one could go on if all of a path were in cells; `depth`, if a file was not looked into yet."""
        stretches = []
        for node in path:
            if node.resident:
                stretches.append(node.start_and_references)
                continue
            for piece in node.entry_slices:
                if piece.entry.placeholder is None:
                    return depth
                outline = self._components.slice(piece.entry.placeholder, piece.start, piece.stop)
                stretches.append((piece.entry.start + piece.start, outline))
        return self._components.resume_depth(stretches, cached_length, depth)

    def _load_node(self, node: Node) -> Node | None:
        """Bring a node's content into cells; what does not fit stays behind as a node below. None: nothing came."""
        held: ComponentReferences = []
        length = 0
        for piece in tuple(node.entry_slices):
            part = self._load_slice(piece)
            if part is None:
                break
            held = self._components.concat(held, part) if length else part
            length += piece.stop - piece.start
        if length == 0:
            return None
        if length < len(node.tokens):
            node = self._radix.split(node, length)
        self._radix.make_resident(node, held)
        self._counts.loaded += length
        return node

    def _load_slice(self, piece: EntrySlice) -> ComponentReferences | None:
        """A piece's content in fresh cells, for which others are evicted; None if it cannot be had."""
        content = self.offload.read(piece.entry)
        if content is None:
            return None
        self._evict_until_freed(self._components.load_shortfall(content, piece.start, piece.stop))
        if any(self._components.load_shortfall(content, piece.start, piece.stop)):
            return None
        return self._components.load(content, piece.start, piece.stop)

    def _insert_files(self) -> None:
        """Take in what earlier processes left in files; what has lost its beginning, or is there twice, is deleted."""
        found = list(self.offload.scan())
        for file, entry in found:
            tokens, start = file.header.tokens, file.header.start
            path, depth = self._radix.match(tokens, file.header.salt)
            if not start <= depth < len(tokens):
                self.offload.remove(entry)
                continue
            node = self._radix.add_tokens(self._radix.node_at_end(path, depth, file.header.salt), tokens[depth:])
            node.fixed_end = file.header.ends_edge
            self.offload.set_entry_slices(
                node, [*node.entry_slices, EntrySlice(entry, depth - start, len(tokens) - start)]
            )
        for _, entry in sorted(found, key=lambda pair: pair[0].last_used):
            if entry.nodes:
                self._radix.touch(max(entry.nodes, key=lambda node: node.stop).path())
        self.offload.enforce_budgets()
